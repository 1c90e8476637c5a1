"""Tiling "tiling-qkv": Q, K and V come in slices of head_dim.

Shared memory does not grow with head_dim at all, but P of the heads of 512 columns and more.  Each
slice of S and of O costs a barrier, and Q is read again, from L2, for every block of keys.

tiling.py has the algorithm and the declarations; tiling_qkv.cu says the same to the compiler.
"""

from kernels.ptx.tiling import Tiling, config, variant

TILING = Tiling(
    name="tiling_qkv",
    query="sliced",
    spills={256: 344, 512: 656},
    narrow_spills={256: 384},
)

CONFIGS = (
    config(64, 64, 2, depth=16),
    config(64, 64, 1, depth=32, swizzle="q"),
    config(128, 64, 2, depth=64, swizzle="qk", grid="heads"),
    config(64, 128, 2, depth=128),
    config(64, 128, 1, depth=64),
    # that every two values meet
    config(128, 128, 1, 8, depth=16, swizzle="none", grid="heads"),
    config(128, 128, 2, 8, depth=32, swizzle="q", grid="heads"),
    config(64, 64, 1, 4, depth=128, swizzle="none"),
    config(64, 128, 1, 4, depth=32),
    config(64, 32, 1, depth=16, swizzle="qk"),
)

VARIANT = variant(TILING, CONFIGS)
VARIANT_F16 = variant(TILING, CONFIGS[:5], narrow=True)
VARIANTS = [VARIANT, VARIANT_F16]

WITNESS = (
    {
        "case": (
            "ptx-tiling-qkv:m64n32s2-swizzle_none-grid_tiles-depth_32:accuracy:b=2,hq=5,hkv=5,"
            "sq=95,skv=95,d=256,dtype=bfloat16,mask=causal.tl,scale=-3.32306998946229e+35,"
            "dist=below_sentinel,seed=304424"
        ),
        "tensor": "out",
        "r": 0.975,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
    {
        "case": (
            "ptx-tiling-qkv-f16:m64n64s2-swizzle_qkv-grid_tiles-depth_16:accuracy:sq=64,skv=32,"
            "d=1024,dtype=float16,dist=negative_lse"
        ),
        "tensor": "out",
        "r": 0.422,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
