"""Faults that can be planted into the forward in CuTe while it runs on the CPU."""

from __future__ import annotations

# P in registers, as `rounded` in tiles.cuh makes it but for two neighbours' conversion.
# On one line: barriers are named by their lines.
CONVERTED = (
    "[&] { Tensor result = make_tensor_like<Element>(scores);"
    " Tensor pairs = recast<uint32_t>(result);"
    " for (int i = 0; i < size(pairs); ++i) { pairs(i) = PACKED; }"
    " return result; }()"
)
FLOAT16_BITS = CONVERTED.replace(
    "PACKED", "ptx::pack<ptx::Format::float16>(scores(2 * i), scores(2 * i + 1))"
)
FLOAT16_FIRST = CONVERTED.replace(
    "pairs(i) = PACKED;",
    "float even, odd;"
    " ptx::unpack<ptx::Format::float16>("
    "ptx::pack<ptx::Format::float16>(scores(2 * i), scores(2 * i + 1)), even, odd);"
    " pairs(i) = ptx::pack<kFormat>(even, odd);",
)
# An expression of flash_forward.cu or of its headers, and what it becomes while that fault is
# planted.
FAULTS = {
    "a table ignored": ("a.row_low != nullptr", "false"),
    "steps not clamped to the keys": (
        "min(int64_t(row) + a.diagonal_high + 1, int64_t(a.seqlen_kv))",
        "int64_t(row) + a.diagonal_high + 1",
    ),
    "a step taken for whole": ("whole.high / length", "(whole.high + length - 1) / length"),
    "the first step passed over": ("some.low / length", "(some.low + length - 1) / length"),
    "keys below a band": ("key < seen.low", "false"),
    "a key too many": ("key >= seen.high", "key > seen.high"),
    # Right wherever the keys of a step divide the rows of a tile, as in every config.
    "steps counted by tiles of rows": (
        "-least(-some.high)",
        "a.row_high == nullptr && a.diagonal_high < a.seqlen_kv"
        " ? max(min((first / rows + 1) * (rows / length) * length + a.diagonal_high,"
        " a.seqlen_kv), 0) : -least(-some.high)",
    ),
    "no mask": ("block < walk.whole.low || block >= walk.whole.high", "false"),
    "no end of rows": ("row < end", "true"),
    "no end of the rows of LSE": ("row < a.seqlen_q", "true"),
    "P of the bits of float16": ("rounded(scores)", FLOAT16_BITS),
    "P rounded to float16 first": ("rounded(scores)", FLOAT16_FIRST),
    "LSE of an empty row is +inf": (
        "0.69314718f * (row_max(r) + log2f(denominator))",
        "sum == 0.0f ? kInfinity : 0.69314718f * (row_max(r) + log2f(denominator))",
    ),
}
