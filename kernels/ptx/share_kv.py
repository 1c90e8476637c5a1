"""Tiling "share-kv": K and V go through the same tiles, one after the other.

With one stage there is one tile: a copy begins when all warps have left it, so nothing overlaps.
With two, what split-q does with one stage; Q is read from its tile for every block of keys, which
leaves registers for more columns.

tiling.py has the algorithm and the declarations; share_kv.cu says the same to the compiler.
"""

from kernels.ptx.tiling import Tiling, config, variant

TILING = Tiling(name="share_kv", query="tile", narrow_spills={256: 152}, spills={256: 96})

CONFIGS = (
    config(64, 64, 1),
    config(64, 64, 2, swizzle="q"),
    config(128, 32, 2, swizzle="none"),
    config(128, 64, 2, 4, swizzle="qk", grid="heads"),
    # that every two values meet
    config(64, 128, 1, 8),
)

VARIANT = variant(TILING, CONFIGS)
# Accumulators of both kinds and 4 warps spill.
VARIANT_F16 = variant(
    TILING, (*CONFIGS[:3], config(128, 64, 2, swizzle="qk", grid="heads")), narrow=True
)
VARIANTS = [VARIANT, VARIANT_F16]

WITNESS = (
    {
        "case": (
            "ptx-share-kv:m128n32s2-swizzle_none-grid_tiles:accuracy:hq=16,hkv=2,sq=16,skv=65,"
            "d=256,dtype=float16,dist=large_logits,seed=536"
        ),
        "tensor": "out",
        "r": 0.968,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
    {
        "case": (
            "ptx-share-kv-f16:m128n64s2-swizzle_qkv-grid_heads:accuracy:b=4,hq=10,hkv=5,sq=167,"
            "skv=47,d=32,dtype=float16,mask=window.15.2,dist=v_mean,seed=14"
        ),
        "tensor": "out",
        "r": 0.467,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
