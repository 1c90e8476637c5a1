"""Faults of the Triton forwards for 8-bit inputs."""

from tests.faults.fault import (
    TRITON_BLOCK_POINTERS,
    TRITON_EIGHT_BITS,
    TRITON_FP8,
    Fault,
)

BLOCK_POINTERS = "triton-block-pointer-fp8-forward"
LONG = "sq=32,skv=1024,d=64,dtype=float8_e4m3fn"

_UNSCALE = "factor_v = 0.00390625  # 1 / 256"
_DESCALE = "_descale(factors, {0}, batch, head_kv)"
_PRODUCT = "acc = tl.dot(p_tile, v_tile, acc, max_num_imprecise_acc=IMPRECISE)"

FAULTS = (
    Fault(
        name="fp8-probability-saturates",
        about="P is multiplied by 512, and saturates at 448",
        source="flash-attention 2409214a",
        file=TRITON_FP8,
        helper=TRITON_EIGHT_BITS,
        edits=((_UNSCALE, "factor_v = 0.001953125  # 1 / 512"), ("(p * 256.0)", "(p * 512.0)")),
        common="sq=16,skv=2048,d=64,dtype=float8_e4m3fn",
    ),
    Fault(
        name="fp8-probability-unscaled",
        about="P is rounded to e4m3 as it is, so that what lies below 2^-10 is lost",
        source="flash-attention 2409214a",
        file=TRITON_FP8,
        helper=TRITON_EIGHT_BITS,
        edits=((_UNSCALE, "factor_v = 1.0"), ("(p * 256.0)", "(p * 1.0)")),
        common=LONG,
    ),
    Fault(
        name="fp8-probability-in-e5m2",
        about="P is rounded to e5m2 before it is rounded to e4m3",
        source="flash-attention 2409214a",
        file=TRITON_FP8,
        helper=TRITON_EIGHT_BITS,
        edits=(("(p * 256.0).to(v_tile.dtype)", "(p * 256.0).to(tl.float8e5).to(v_tile.dtype)"),),
        common=LONG,
    ),
    Fault(
        name="fp8-descale-of-v-dropped",
        about="the factor of V is left out",
        source="vllm PR #42580",
        file=TRITON_FP8,
        helper=TRITON_EIGHT_BITS,
        edits=((f"        factor_v = factor_v * {_DESCALE.format(2)}\n", ""),),
        common=LONG,
    ),
    Fault(
        name="fp8-descale-of-query-head",
        about="the factor of K is looked up by the query's head, not the key's",
        source="vllm PR #42580",
        file=TRITON_FP8,
        helper=TRITON_EIGHT_BITS,
        edits=((_DESCALE.format(1), _DESCALE.format(1).replace("head_kv", "head.to(tl.int64)")),),
        common=LONG,
    ),
    Fault(
        name="fp8-descale-of-first-sequence",
        about="the factor of Q is that of the first sequence",
        source="vllm PR #42580",
        file=TRITON_FP8,
        helper=TRITON_EIGHT_BITS,
        edits=((_DESCALE.format(0), _DESCALE.format(0).replace("batch", "batch * 0")),),
        common=LONG,
    ),
    Fault(
        name="fp8-lse-keeps-factor",
        about="the LSE keeps the factor 256 of P",
        source="none known",
        file=TRITON_FP8,
        edits=(("0.6931471805599453 * lse_rows", "0.6931471805599453 * (lse_rows + 8.0)"),),
        common=LONG,
    ),
    Fault(
        name="fp8-factor-in-fp16",
        about="the product of scale and factors is rounded to fp16",
        source="none known",
        file=TRITON_FP8,
        helper=TRITON_EIGHT_BITS,
        edits=(
            (
                "return product * factor",
                "return product * factor.to(tl.float16).to(tl.float32)",
            ),
        ),
        common=LONG,
    ),
    Fault(
        name="fp8-accumulator-in-fp16",
        about="the accumulator of P V is kept in fp16, where 256 p v overflows",
        source="SageAttention #93",
        file=TRITON_FP8,
        helper=TRITON_EIGHT_BITS,
        edits=((_PRODUCT, f"{_PRODUCT}.to(tl.float16).to(tl.float32)"),),
        common=LONG,
    ),
    Fault(
        name="fp8-block-pointer-factor-of-the-step",
        about="V's factor of a block of rows is looked up by the step of the walk, not by its keys",
        source="none known",
        file=TRITON_BLOCK_POINTERS,
        variant=BLOCK_POINTERS,
        edits=(("place = batch, head_kv, begin", "place = batch, head_kv, i * BLOCK_N"),),
        common=LONG,
    ),
)
