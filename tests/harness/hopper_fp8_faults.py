"""Faults of the Hopper forward of 8 bits, one for each mechanism, and the questions that show
them; those of what it shares with the forward for 16 bits are in `hopper_forward_faults`."""

from __future__ import annotations

from functools import partial

from tests.harness.hopper_faults import one_switch

PLAIN = "sq=65,skv=97"
MANY_BLOCKS = "sq=128,skv=450"
FACTORS = "b=2,hq=4,hkv=2,sq=70,skv=200,mask=causal,descale=head"
HALF = "sq=130,skv=70,mask=causal,descale=tensor,out=float16"
ZERO = "sq=65,skv=97,scale=0.0"
WINDOW = "sq=140,skv=290,mask=window.70.3"
INCREASING = "sq=140,skv=257,mask=causal,dist=increasing"
DEEP = "sq=66,skv=290,mask=window.160.9"
PADDED = "b=2,sq=40,skv=250,mask=lengths.30_40.67_200"

_one = partial(one_switch, plain=PLAIN)

# V transposed: where chunks lie, and who may read when.
_TRANSPOSED = {
    "rows of 64 bytes swizzled as of 128": _one("row / 2 % 4", "row % 4"),
    "the second piece of V is the first": _one(
        "chunk / kChunks * BLOCK_N * kPiece", "0", DEEP, build="deep"
    ),
    "V transposed with its halves exchanged": _one(
        "2 * key + lane / 16", "2 * key + 1 - lane / 16"
    ),
    "an odd key is kept with the even one": _one(
        "own + 1 >= seen.low && own + 1 < seen.high",
        "own >= seen.low && own < seen.high",
        PADDED,
        "poison",
    ),
    "zeros up to the first key of the tensor": _one("walk.some.low - key", "walk.some.low", WINDOW),
    "Vt is here when one warp has stored": _one(
        "kTransposers",
        "1",
        MANY_BLOCKS,
        "execution",
        before="initialize_barrier(memory.vt_here[slot], ",
        slow="last transposers",
    ),
    "V has been read when consumers have": _one(
        "kTransposers",
        "kConsumerWarps",
        MANY_BLOCKS,
        "execution",
        before="initialize_barrier(memory.v_read[slot], ",
    ),
    "Vt's slot is taken again for free once": _one(
        "t >= STAGES",
        "t > STAGES",
        MANY_BLOCKS,
        before="if (",
        slow="first consumer",
    ),
    "Vt waits for the phase to come": _one(
        "turn.parity ^ 1",
        "turn.parity",
        MANY_BLOCKS,
        before="wait_barrier(shared.vt_read[turn.slot], ",
    ),
}
# Promotion and factors.
_FACTORS = {
    "half of the columns promoted twice": _one(
        "acc(i + n * size(sums))", "acc(i)", DEEP, build="deep"
    ),
    "a block's sums go on from the one before": _one(
        "GMMA::ScaleOut::Zero",
        "GMMA::ScaleOut::One",
        MANY_BLOCKS,
        build="overlap",
        before="if constexpr (kPromoted) {\n        begin_product(MmaO{}, ",
    ),
    "a block's sums with the factor of the next": _one(
        "alpha(r, 0)",
        "next(r, 0)",
        INCREASING,
        build="overlap",
        before="__fmaf_rn(o(r, c), ",
    ),
    "the factor stays that of the first block": _one(
        "alpha(r, 0) = next(r, 0)", "alpha(r, 0) = alpha(r, 0)", INCREASING, build="overlap"
    ),
    "LSE of raw scores": _one("row_max(r) *= factor", "row_max(r) *= 1.0f"),
    "alpha of raw scores": _one(
        "__fmul_rn(factor, __fsub_rn(row_max(r), most))", "__fsub_rn(row_max(r), most)", INCREASING
    ),
    "O keeps P's factor": _one("kScaleP", "1.0f", before="batch, head_kv) / "),
    "a factor of zero": _one("factor == 0.0f ? 1.0f : fabsf(factor)", "fabsf(factor)", ZERO),
    "Q's factor of the query's head": _one(
        "factor_of(a.descale_q, batch, head_kv)", "factor_of(a.descale_q, batch, head)", FACTORS
    ),
    "factors of the first batch": _one(
        "batch * factors.batch + head_kv * factors.head", "head_kv * factors.head", FACTORS
    ),
    "O in the other format": _one("a.out_is_half", "!a.out_is_half", HALF, before="if ("),
    "O's odd columns exchanged": _one(
        "ptx::pack<format>(o(r, c + 1), o(r, c + 3))", "ptx::pack<format>(o(r, c + 3), o(r, c + 1))"
    ),
}
FAULTS = _TRANSPOSED | _FACTORS
# The cheapest of every kind, and those that only one question shows.
TELLING = (
    "rows of 64 bytes swizzled as of 128",
    "an odd key is kept with the even one",
    "Vt is here when one warp has stored",
    "a block's sums with the factor of the next",
    "a factor of zero",
    "factors of the first batch",
)
