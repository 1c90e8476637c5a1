"""Faults of the Triton forward for 8-bit inputs whose V is stored transposed."""

from tests.faults.fault import TRITON_EIGHT_BITS, TRITON_FP8_TRANSPOSED, Fault

WHOLE = "sq=32,skv=1024,d=64,dtype=float8_e4m3fn,lv=transposedv"
VARIANT = "triton-fp8-transposed-forward"
# It is declared for GPUs alone: the interpreter adds up its blocks exactly.
PROMOTED_BY_BLOCK = "triton-fp8-transposed-block-forward"
WIDE = "triton-fp8-transposed-wide-forward"

FAULTS = (
    Fault(
        name="fp8-transposed-gap-enters",
        about="keys of a piece that no row sees enter P V, as 0 times what lies there",
        source="none known",
        file=TRITON_FP8_TRANSPOSED,
        variant=VARIANT,
        edits=(("tl.where(seen[None, :], v_tile, 0.0)", "v_tile + 0.0"),),
        common=WHOLE,
    ),
    Fault(
        name="fp8-transposed-last-piece-dropped",
        about="a last piece of V of fewer than 16 keys is not loaded",
        source="none known",
        file=TRITON_FP8_TRANSPOSED,
        variant=VARIANT,
        edits=(("(piece < tl.cdiv(last, PIECE))", "(piece < last // PIECE)"),),
        common=WHOLE,
    ),
    Fault(
        name="fp8-transposed-row-of-keys",
        about="a row of V is taken to be seqlen_kv long, whatever its pitch",
        source="none known",
        file=TRITON_FP8_TRANSPOSED,
        variant=VARIANT,
        edits=(
            (
                "rows_of(v_head, steps[2], dims_v, ALIGNED)",
                "v_head + dims_v.to(tl.int64)[:, None] * seqlen_kv",
            ),
        ),
        common=WHOLE,
    ),
    Fault(
        name="fp8-block-sum-in-fp16",
        about="the sum of a block of keys is rounded to fp16, where 256 p v overflows",
        source="SageAttention #93",
        file=TRITON_FP8_TRANSPOSED,
        helper=TRITON_EIGHT_BITS,
        variant=PROMOTED_BY_BLOCK,
        edits=(
            (
                "acc += tl.dot(p_tile, v_tile)",
                "acc += tl.dot(p_tile, v_tile).to(tl.float16).to(tl.float32)",
            ),
        ),
        common=WHOLE,
    ),
    Fault(
        name="fp8-wide-loads-half-a-block",
        about="of a block of 128 keys, pieces of V beyond the 64th key are not loaded",
        source="none known",
        file=TRITON_FP8_TRANSPOSED,
        variant=WIDE,
        edits=(
            (
                "(piece < tl.cdiv(last, PIECE))",
                "(piece < tl.minimum(tl.cdiv(last, PIECE), begin // PIECE + 4))",
            ),
        ),
        common=WHOLE,
    ),
)
