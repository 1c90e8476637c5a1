"""Which builds the forwards with a transposed V have, and what each of them may spill."""

from kernels.triton.eight_bits import PROMOTION

BUILDS: tuple[tuple[str, int, str, bool, str, str], ...] = (
    ("float8_e4m3fn", 128, "full", True, "bfloat16", "head"),
    ("float8_e5m2", 128, "window", True, "bfloat16", "head"),
    ("float8_e5m2", 64, "causal", True, "bfloat16", "head"),
    ("float8_e4m3fn", 256, "window", True, "bfloat16", "head"),
    ("float8_e4m3fn", 32, "interval", True, "bfloat16", "head"),
    ("float8_e5m2", 72, "causal", False, "bfloat16", "head"),
    ("float8_e4m3fn", 128, "causal", True, "float8_e4m3fn", "head"),
    ("float8_e5m2", 64, "window", True, "float8_e5m2", "head"),
    ("float8_e4m3fn", 128, "causal", True, "bfloat16", "block64"),
    ("float8_e5m2", 64, "window", True, "bfloat16", "block128"),
    ("float8_e4m3fn", 72, "full", False, "bfloat16", "block64"),
)

# Bytes per thread: the most of Triton 3.6 and 3.7.  64 keys that are loaded one by
# one fill the registers.
_UNALIGNED = {"sm_89": 96, "sm_90a": 144, "sm_100a": 144}
_UNALIGNED_BLOCKS = {"sm_89": 104, "sm_90a": 136, "sm_100a": 136, "sm_120a": 24}
SPILL_BUDGETS: dict[int | str, dict[str, dict[str, int]]] = {
    PROMOTION: {
        "m128n64w8s2, float8_e5m2, d 72, causal, unaligned": _UNALIGNED,
        "m128n64w8s2, float8_e4m3fn, d 72, full, unaligned, block64": _UNALIGNED_BLOCKS,
        "m64n32w4s2, float8_e4m3fn, d 72, full, unaligned, block64": {
            "sm_90a": 128,
            "sm_100a": 128,
            "sm_120a": 8,
        },
        "m128n64w8s2, float8_e4m3fn, d 128, causal, block64": {"sm_89": 32, "sm_120a": 228},
        "m64n32w4s2, float8_e4m3fn, d 32, interval": {"sm_100a": 8},
        "m64n32w4s2, float8_e4m3fn, d 256, window": {"sm_89": 68, "sm_100a": 16},
        "m64n32w4s2, float8_e4m3fn, d 128, full": {"sm_100a": 8, "sm_120a": 16},
        "m64n32w4s2, float8_e5m2, d 64, causal": {"sm_100a": 8},
        "m64n32w4s2, float8_e5m2, d 64, window, out float8_e5m2": {"sm_100a": 8},
    },
    "block": {
        "m128n64w8s3, float8_e5m2, d 72, causal, unaligned": _UNALIGNED | {"sm_90a": 152},
        "m128n64w8s3, float8_e4m3fn, d 72, full, unaligned, block64": _UNALIGNED_BLOCKS,
        "m128n64w8s3, float8_e4m3fn, d 128, causal, block64": {"sm_89": 24, "sm_120a": 92},
        "m64n128w4s3, float8_e4m3fn, d 128, full": {"sm_90a": 16},
        "m64n128w4s3, float8_e5m2, d 128, window": {"sm_90a": 16},
        "m64n128w4s3, float8_e5m2, d 64, causal": {"sm_90a": 76},
        "m64n128w4s3, float8_e5m2, d 72, causal, unaligned": {"sm_90a": 1468},
        "m64n128w4s3, float8_e4m3fn, d 128, causal, out float8_e4m3fn": {"sm_90a": 48},
        "m64n128w4s3, float8_e5m2, d 64, window, out float8_e5m2": {"sm_90a": 88},
        "m64n128w4s3, float8_e5m2, d 64, window, block128": {"sm_90a": 96},
    },
}
