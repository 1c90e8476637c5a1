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
            "ptx-share-kv:m128n32s2-swizzle_none-grid_tiles:accuracy:b=3,hq=5,hkv=5,sq=90,skv=95,"
            "d=96,dtype=bfloat16,mask=documents.5_90,scale=3.32306998946229e+35,lq=sbhd,lk=sbhd,"
            "lv=sbhd,lo=sbhd,ldo=sbhd,dist=below_sentinel,seed=65"
        ),
        "tensor": "out",
        "r": 0.974,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
    {
        "case": (
            "ptx-share-kv-f16:m128n32s2-swizzle_none-grid_tiles:accuracy:b=2,hq=6,hkv=3,sq=176,"
            "skv=176,d=96,dtype=float16,mask=documents.1_129_46,lk=transposed.p64,dist=v_mean,"
            "seed=198"
        ),
        "tensor": "out",
        "r": 0.372,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
