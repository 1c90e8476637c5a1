"""Tiling "tiling-qk": Q and K come in slices of head_dim; V has a tile.

Shared memory for Q and K does not grow with head_dim.  Each slice brings as many columns of V, so
that V is there when S is complete.  Q is read again, from L2, for every block of keys.

tiling.py has the algorithm and the declarations; tiling_qk.cu says the same to the compiler.
"""

from kernels.ptx.tiling import Tiling, config, variant

TILING = Tiling(
    name="tiling_qk",
    query="sliced",
    v_tile=True,
    spills={512: 520},
    narrow_spills={256: 84, 512: 28, 1024: 56},
)

CONFIGS = (
    config(64, 32, 2, depth=16),
    config(64, 32, 1, depth=32, swizzle="none"),
    config(128, 32, 2, depth=128, grid="heads"),
    config(64, 64, 2, depth=128, grid="heads"),
    # that every two values meet
    config(64, 32, 1, 4, depth=64, swizzle="q"),
    config(64, 64, 1, 8, depth=128, swizzle="qk"),
    config(64, 32, 1, 8, depth=64, swizzle="none"),
    config(64, 32, 1, 4, depth=16, swizzle="q"),
    config(64, 32, 1, depth=128, swizzle="q"),
    config(64, 32, 1, depth=32, swizzle="qk"),
)

VARIANT = variant(TILING, CONFIGS)
VARIANT_F16 = variant(TILING, CONFIGS[:4], narrow=True)
VARIANTS = [VARIANT, VARIANT_F16]

WITNESS = (
    {
        "case": (
            "ptx-tiling-qk:m64n32s2-swizzle_qkv-grid_tiles-depth_16:accuracy:b=2,hq=5,hkv=5,sq=95,"
            "skv=95,d=256,dtype=bfloat16,mask=causal.tl,scale=-3.32306998946229e+35,"
            "dist=below_sentinel,seed=304424"
        ),
        "tensor": "out",
        "r": 0.975,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
    {
        "case": (
            "ptx-tiling-qk-f16:m64n32s2-swizzle_qkv-grid_tiles-depth_16:accuracy:b=2,sq=269,"
            "skv=269,d=256,dtype=float16,mask=causal.tl,dist=ones_v,seed=40241"
        ),
        "tensor": "out",
        "r": 0.498,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
