"""Tiling "tiling-qkv": Q, K and V come in slices of head_dim.

Shared memory does not grow with head_dim at all, but P of the heads of 512 columns and more.  Each
slice of S and of O costs a barrier, and Q is read again, from L2, for every block of keys.

tiling.py has the algorithm and the declarations; tiling_qkv.cu says the same to the compiler.
"""

from kernels.ptx.tiling import Tiling, config, variant

TILING = Tiling(name="tiling_qkv", query="sliced", spills={256: 504, 512: 576})

CONFIGS = (
    config(64, 64, 2, depth=16),
    config(64, 64, 1, depth=32, swizzle="qk"),
    config(128, 64, 2, depth=64, grid="heads"),
    config(64, 64, 2, depth=128, swizzle="q"),
    config(64, 32, 2, depth=32, swizzle="none"),
)

VARIANT = variant(TILING, CONFIGS)
VARIANT_F16 = variant(TILING, CONFIGS, narrow=True)
VARIANTS = [VARIANT, VARIANT_F16]
