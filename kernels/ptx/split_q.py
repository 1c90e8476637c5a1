"""Tiling "split-q": every warp has rows of its own and sees all keys (FlashAttention-2).

No two warps share a row, so softmax statistics never leave a warp.  Q stays in registers; K and V
have tiles of their own, so that with one stage V(i) travels while S(i) is computed, and K(i + 1)
during P V(i), and with two stages three tiles are on their way at any time.

tiling.py has the algorithm and the declarations; split_q.cu says the same to the compiler.
"""

from kernels.ptx.tiling import Tiling, config, variant

TILING = Tiling(name="split_q", query="tile", q_kept=True, slots=2, narrow_spills={256: 116})

CONFIGS = (
    config(64, 64, 1),
    config(64, 32, 2, swizzle="none"),
    config(128, 64, 1, grid="heads"),
    config(128, 32, 2, swizzle="qk"),
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
            "ptx-split-q:m64n32s2-swizzle_none-grid_tiles:accuracy:b=3,hq=5,hkv=5,sq=90,skv=95,"
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
            "ptx-split-q-f16:m128n64s1-swizzle_qkv-grid_heads:accuracy:b=4,hq=10,hkv=5,sq=167,"
            "skv=47,d=32,dtype=float16,mask=window.15.2,dist=v_mean,seed=14"
        ),
        "tensor": "out",
        "r": 0.467,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
