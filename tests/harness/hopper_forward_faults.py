"""Faults of the Hopper forward for 16 bits, one for each mechanism, and the questions that show
them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tests.harness.hopper_faults import Fault, Switch, one_switch

if TYPE_CHECKING:
    from tests.harness.cute_hopper_host import Map

TWO_BLOCKS = "sq=65,skv=97"
MANY_BLOCKS = "sq=65,skv=330"
HEADS = "b=2,hq=4,hkv=2,sq=67,skv=150"
REPEATED = "b=2,hq=2,hkv=2,sq=8,skv=8,lk=bhsd.xh,lv=bhsd.xb"  # as a campaign's edge case
CAUSAL = "sq=140,skv=330,mask=causal"
INCREASING = "sq=140,skv=257,mask=causal,dist=increasing"
WINDOW = "sq=140,skv=290,mask=window.70.3"
LENGTHS = "b=2,sq=140,skv=210,mask=lengths.140_130.0_200"
# As a campaign's edge cases: the first row of a tile lacks the last key of a block.
WHOLE_BUT_ONE = "sq=128,skv=254,mask=causal"
# Keys that no row sees, before the others and behind them.
FAR_WINDOW = "sq=70,skv=390,mask=window.20.3"
PADDED = "b=2,sq=40,skv=250,mask=lengths.30_40.67_200"
# Of persistent programs: more tiles of rows than programs.
SHORT = "hq=7,sq=128,skv=60"
ROUNDS = "hq=3,sq=300,skv=65,mask=causal"

_one = partial(one_switch, plain=TWO_BLOCKS)


def _unswizzled(made: Map) -> None:
    made.row = 16


def _exchanged(made: Map) -> None:
    made.strides[1], made.strides[2] = made.strides[2], made.strides[1]


def _twice_as_high(made: Map) -> None:
    made.box[1] *= 2


_PACKED = "ptx::pack<kFormat>(accumulator(2 * i), accumulator(2 * i + 1))"
_TWICE = (
    "[&] { float even, odd; ptx::unpack<ptx::Format::float16>(ptx::pack<ptx::Format::float16>("
    "accumulator(2 * i), accumulator(2 * i + 1)), even, odd);"
    " return ptx::pack<kFormat>(even, odd); }()"
)
_MEETING = "cutlass::arch::NamedBarrier::sync(kGroup, kBarrierGroup + warpgroup);"
_Q_READ = "arrive_barrier(shared.q_read[query.slot])"

# P, the left operand of the second product; descriptors and swizzles.
_OPERANDS = {
    "P's pairs in the other order": _one(
        _PACKED, "ptx::pack<kFormat>(accumulator(2 * i + 1), accumulator(2 * i))"
    ),
    "P's groups of eight keys exchanged": _one(
        _PACKED, "ptx::pack<kFormat>(accumulator(2 * i ^ 4), accumulator(2 * i + 1 ^ 4))"
    ),
    "P of the bits of float16": _one(_PACKED, _PACKED.replace("kFormat", "ptx::Format::float16")),
    "P rounded to float16 first": _one(_PACKED, _TWICE),
    "every k-step has the first's descriptor": _one(
        "b(_, k)", "b(_, 0)", before="gemm(mma, a(_, k), "
    ),
    "K's descriptor is of the first slot": _one(
        "operand_k(_, 0, _, turn.slot)", "operand_k(_, 0, _, 0)"
    ),
    "V's descriptor is of the other slot": _one(
        "operand_v(_, 0, _, turn.slot)", "operand_v(_, 0, _, (turn.slot + 1) % STAGES)"
    ),
    "both consumers multiply the same rows of Q": _one(
        "warpgroup * kGroup", "0 * warpgroup", before="MmaS{}.get_slice("
    ),
    "a map without a swizzle": Fault(
        (), "small", TWO_BLOCKS, "bound", map_of="k", changed=_unswizzled
    ),
    "scores go on from the block before": _one("GMMA::ScaleOut::Zero", "GMMA::ScaleOut::One"),
    "P V begins at zero in every block": _one(
        "GMMA::ScaleOut::One", "GMMA::ScaleOut::Zero", before="begin_product(MmaO{}, "
    ),
}
# Boxes of copies, and the bytes that a barrier is told; heads and batches.
_COPIES = {
    "Q's pieces lie as close as K's": _one("piece * rows * kPiece", "piece * BLOCK_N * kPiece"),
    "every piece has the first columns": _one("piece * kPiece", "0", after=", row"),
    "the bytes of one piece are expected": _one(
        "rows * HEAD_DIM * sizeof(Element)", "rows * kPiece * sizeof(Element)"
    ),
    "V's bytes are expected at K's barrier": _one(
        "shared.v_here[turn.slot]",
        "shared.k_here[turn.slot]",
        by="execution",
        before="shared.v + place,\n            ",
    ),
    "strides of heads and batches exchanged": Fault(
        (), "small", HEADS, "bound", map_of="v", changed=_exchanged
    ),
    "a box of twice the rows": Fault(
        (), "small", TWO_BLOCKS, "bound", map_of="k", changed=_twice_as_high
    ),
    "the index of a head where all are one": _one("tensor.head ? head : 0", "head", REPEATED),
    "the index of a batch where all are one": _one("tensor.batch ? batch : 0", "batch", REPEATED),
    "the key heads take turns": _one(
        "tile.head / a.group", "tile.head % (a.heads_q / a.group)", HEADS
    ),
}
# Parities, who arrives, and what comes before what.
_PHASES = {
    "K waits for the phase to come": _one(
        "turn.parity ^ 1",
        "turn.parity",
        MANY_BLOCKS,
        "execution",
        before="wait_barrier(shared.k_read[turn.slot], ",
    ),
    "the parity of the tile, not of its round": _one(
        "t / slots % 2", "t % 2", MANY_BLOCKS, "execution"
    ),
    "one warp of a consumer arrives": _one(
        "consumer % 32 == 0", "consumer % kGroup == 0", MANY_BLOCKS, "execution"
    ),
    "every thread arrives": _one("consumer % 32 == 0", "true", MANY_BLOCKS, "execution"),
    "a slot is free when one consumer has read it": _one(
        "kConsumerWarps",
        "kConsumerWarps / kConsumers",
        MANY_BLOCKS,
        "execution",
        before="initialize_barrier(memory.v_read[slot], ",
    ),
    "K's slot is free before its product is finished": _one(
        "finish_product<0>(scores);\n      release(shared.k_read, t);",
        "release(shared.k_read, t); finish_product<0>(scores);",
        MANY_BLOCKS,
        before="begin_scores(t);\n      ",
        slow="products",
    ),
    "P V begins before the next scores": _one(
        "begin_scores(t);\n        begin_values(t - 1);",
        "begin_values(t - 1); begin_scores(t);",
        MANY_BLOCKS,
        build="overlap",
    ),
    "P is packed over the one that is multiplied": _one(
        "finish_product<0>(acc, operand_p);",
        "to_left_operand(scores, operand_p); finish_product<0>(acc, operand_p);",
        MANY_BLOCKS,
        build="overlap",
        after="\n        release(shared.v_read, t - 1);",
    ),
    "alpha goes on from the block before": _one(
        "fill(alpha, 1.0f);",
        ";",
        MANY_BLOCKS,
        build="overlap",
        after="\n        weigh_keys(t, alpha)",
    ),
}
# Masks and steps; zeros in V.
_MASKS = {
    "a block taken for whole": _one("key + BLOCK_N > every.high", "key > every.high", CAUSAL),
    "a block whole but for its last key": _one(
        "key + BLOCK_N > every.high", "key + BLOCK_N - 1 > every.high", WHOLE_BUT_ONE
    ),
    "a block whole though keys lie before the window": _one("key < every.low", "false", WINDOW),
    "the first block passed over": _one(
        "some.low / BLOCK_N", "(some.low + BLOCK_N - 1) / BLOCK_N", WINDOW
    ),
    "the last block passed over": _one(
        "(some.high + BLOCK_N - 1) / BLOCK_N", "some.high / BLOCK_N"
    ),
    "the walk begins where the last row does": _one(
        "min(walk.some.low, seen.low)", "seen.low", WINDOW
    ),
    "a key too many": _one("column >= seen[r].high", "column > seen[r].high", CAUSAL),
    "keys before the window": _one("column < seen[r].low", "false", WINDOW),
    "the second consumer masks the first's rows": _one(
        "consumer", "consumer % kGroup", CAUSAL, before="MmaS{}.get_slice("
    ),
    "the table of the first sequence": _one(
        "int64_t(batch) * a.seqlen_q + row", "int64_t(row)", LENGTHS
    ),
    "half of the threads write zeros": _one(
        "consumer", "consumer % kGroup", PADDED, "poison", before="int i = ", after="; i < kChunks"
    ),
    "zeros in the first slot": _one(
        "shared.v + turn.slot * BLOCK_N * HEAD_DIM", "shared.v", PADDED
    ),
    "no zeros before the first key": _one(
        "key < some.low", "false", FAR_WINDOW, "poison", after=" || key + BLOCK_N"
    ),
    "no zeros behind the last key": _one("key + BLOCK_N > some.high", "false", PADDED, "poison"),
}
# The running softmax, LSE, and O.
_SUMS = {
    "the maximum of two lanes of four": _one("ptx::shfl_bfly(largest, 2)", "largest"),
    "-inf less -inf": _one(
        "largest == -kInfinity ? 0.0f : largest", "largest", LENGTHS, "empty_rows"
    ),
    "the maximum begins at zero": _one(
        "-kInfinity", "0.0f", LENGTHS, "empty_rows", before="fill(row_max, "
    ),
    "the sum is not rescaled": _one("row_sum(r) * alpha + sum", "row_sum(r) + sum", INCREASING),
    "O is not rescaled": _one("o(r, c) *= alpha", "o(r, c) *= 1.0f", INCREASING, after=";"),
    "the sum of two lanes of four": _one("ptx::shfl_bfly(sum, 2)", "0.0f"),
    "the sum of P as it is rounded": _one("sum += x(r, c)", "sum += float(ELEMENT(x(r, c)))"),
    "LSE in base 2": _one("0.69314718f", "1.0f"),
    "LSE without its maximum": _one("row_max(r) + log2f(denominator)", "log2f(denominator)"),
    "LSE's place counts key heads": _one(
        "int64_t(batch) * a.heads_q + head",
        "int64_t(batch) * (a.heads_q / a.group) + head",
        HEADS,
    ),
    "O's rows of the first consumer": _one(
        "warpgroup * 64 + i / (HEAD_DIM / kChunk)", "i / (HEAD_DIM / kChunk)"
    ),
    "rows of O past the end": _one(
        "row < a.seqlen_q", "true", by="memory", after=") {\n      auto chunk"
    ),
}
# The persistent schedule.
_ROUNDS = {
    "O leaves through the first slot of Q": _one(
        "tiles_q(_, _, query.slot)", "tiles_q(_, _, 0)", SHORT, build="persistent"
    ),
    "Q is free before O lies there": Fault(
        (
            Switch(
                _MEETING, f"if (kPersistent && blocks > 0 && signals) {{ {_Q_READ}; }} {_MEETING}"
            ),
            Switch(_Q_READ, "void()"),
        ),
        "persistent",
        SHORT,
        "bound",
    ),
    "the last round is left out": _one(
        "a.tiles - full * programs", "0", ROUNDS, "empty_rows", build="persistent", before=" < "
    ),
    "rounds do not turn": _one(
        "round % 2 ? programs - 1 - tile : tile", "tile", SHORT, "memory", build="persistent"
    ),
    "the longest first, of heads in their order": _one(
        "a.by_length ? tile % heads : tile / count", "tile / count", ROUNDS, build="persistent"
    ),
    "heads in turn, of tiles in their order": _one(
        "a.by_length ? tile / heads : tile % count", "tile % count", ROUNDS, build="persistent"
    ),
}
FAULTS = _OPERANDS | _COPIES | _PHASES | _MASKS | _SUMS | _ROUNDS
# O and LSE are right on every problem; docs/cute.md says why.
EQUIVALENT = {
    "a row without keys is like any other": _one("empty", "false", LENGTHS, "", after=" ? 0 : min"),
    "scores wait for P V of the block before": _one(
        "finish_product<1>(scores);", "finish_product<0>(scores);", MANY_BLOCKS, "", build="overlap"
    ),
}
# The cheapest of every kind, and those that only one question shows.
TELLING = (
    "P's pairs in the other order",
    "P rounded to float16 first",
    "V's descriptor is of the other slot",
    "a map without a swizzle",
    "the bytes of one piece are expected",
    "the index of a head where all are one",
    "the key heads take turns",
    "the parity of the tile, not of its round",
    "K's slot is free before its product is finished",
    "P V begins before the next scores",
    "a block whole but for its last key",
    "no zeros behind the last key",
    "the maximum begins at zero",
    "the sum of P as it is rounded",
    "Q is free before O lies there",
    "rounds do not turn",
)
