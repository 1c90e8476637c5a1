"""Tiling "split-kv": two warps share rows; each has half of the keys of S and half of O's columns.

So a warp has twice the rows that it would have alone, and reads half of K and V: but the rows'
maxima, their sums and P go through shared memory, with two barriers more per block of keys
(FlashAttention's first version divided its work like this).

tiling.py has the algorithm and the declarations; split_kv.cu says the same to the compiler.
"""

from kernels.ptx.tiling import Tiling, config, variant

TILING = Tiling(name="split_kv", query="tile", slots=2, warps_n=2)

CONFIGS = (
    config(64, 64, 1),
    config(128, 64, 1, swizzle="q"),
    config(64, 32, 2, grid="heads"),
    # that every two values meet
    config(64, 128, 1, 8, swizzle="qk"),
    config(64, 32, 1, 4, swizzle="none"),
)

VARIANT = variant(TILING, CONFIGS)
VARIANT_F16 = variant(TILING, CONFIGS[:3], narrow=True)
VARIANTS = [VARIANT, VARIANT_F16]

WITNESS = (
    {
        "case": (
            "ptx-split-kv:m64n32s2-swizzle_qkv-grid_heads:accuracy:b=3,hq=5,hkv=5,sq=90,skv=95,"
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
            "ptx-split-kv-f16:m64n64s1-swizzle_qkv-grid_tiles:accuracy:b=4,hq=10,hkv=5,sq=167,"
            "skv=47,d=32,dtype=float16,mask=window.15.2,dist=v_mean,seed=14"
        ),
        "tensor": "out",
        "r": 0.467,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
