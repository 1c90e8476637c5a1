"""Tiling "tiling-qk": Q and K come in slices of head_dim; V has a tile.

Shared memory for Q and K does not grow with head_dim.  Each slice brings as many columns of V, so
that V is there when S is complete.  Q is read again, from L2, for every block of keys.

tiling.py has the algorithm and the declarations; tiling_qk.cu says the same to the compiler.
"""

from kernels.ptx.tiling import Tiling, config, variant

TILING = Tiling(name="tiling_qk", query="sliced", v_tile=True, spills={256: 548, 512: 400})

CONFIGS = (
    config(64, 32, 2, depth=16),
    config(64, 32, 1, depth=32, swizzle="none"),
    config(128, 32, 2, depth=64, grid="heads"),
    config(64, 64, 2, depth=128, grid="heads"),
)

VARIANT = variant(TILING, CONFIGS)
VARIANT_F16 = variant(TILING, CONFIGS, narrow=True)
VARIANTS = [VARIANT, VARIANT_F16]
