"""Tiling "share-qkv": Q, K and V go through the same tiles.

Q goes first, block_n rows at a time and slot, and stays in registers; then K and V in turn.  With
block_m = 2 block_n and one stage this takes a quarter of split-q's shared memory.

tiling.py has the algorithm and the declarations; share_qkv.cu says the same to the compiler.
"""

from kernels.ptx.tiling import Tiling, config, variant

TILING = Tiling(
    name="share_qkv", query="ring", q_kept=True, spills={256: 216}, narrow_spills={256: 432}
)

CONFIGS = (
    config(64, 64, 2),
    config(128, 32, 1, swizzle="qk"),
    config(128, 64, 2, grid="heads"),
    config(64, 32, 1, swizzle="none"),
    # that every two values meet
    config(64, 32, 1, 8, swizzle="q"),
    config(64, 32, 1, 4, swizzle="none"),
)

VARIANT = variant(TILING, CONFIGS)
VARIANT_F16 = variant(TILING, CONFIGS[:4], narrow=True)
VARIANTS = [VARIANT, VARIANT_F16]

WITNESS = (
    {
        "case": (
            "ptx-share-qkv:m128n32s1-swizzle_qk-grid_tiles:accuracy:b=3,hq=5,hkv=5,sq=90,skv=95,"
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
            "ptx-share-qkv-f16:m128n64s2-swizzle_qkv-grid_heads:accuracy:b=4,hq=10,hkv=5,sq=167,"
            "skv=47,d=32,dtype=float16,mask=window.15.2,dist=v_mean,seed=14"
        ),
        "tensor": "out",
        "r": 0.467,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
