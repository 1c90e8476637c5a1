"""Tiling "share-qkv": Q, K and V go through the same tiles.

Q goes first, block_n rows at a time and slot, and stays in registers; then K and V in turn.  With
block_m = 2 block_n and one stage this takes a quarter of split-q's shared memory.

tiling.py has the algorithm and the declarations; share_qkv.cu says the same to the compiler.
"""

from kernels.ptx.tiling import Tiling, config, variant

TILING = Tiling(name="share_qkv", query="ring", spills={256: 992})

CONFIGS = (
    config(64, 64, 2),
    config(128, 32, 1, swizzle="qk"),
    config(128, 64, 2, grid="heads"),
    config(64, 32, 1, swizzle="none"),
)

VARIANT = variant(TILING, CONFIGS)
VARIANT_F16 = variant(TILING, CONFIGS, narrow=True)
VARIANTS = [VARIANT, VARIANT_F16]
