"""Tiling "split-q": every warp has rows of its own and sees all keys (FlashAttention-2).

No two warps share a row, so softmax statistics never leave a warp.  Q stays in registers; K and V
have tiles of their own, so that with one stage V(i) travels while S(i) is computed, and K(i + 1)
during P V(i), and with two stages three tiles are on their way at any time.

tiling.py has the algorithm and the declarations; split_q.cu says the same to the compiler.
"""

from kernels.ptx.tiling import Tiling, config, variant

TILING = Tiling(name="split_q", query="tile", slots=2, spills={256: 272})

CONFIGS = (
    config(64, 64, 1),
    config(64, 32, 2, swizzle="none"),
    config(128, 64, 1, grid="heads"),
    config(128, 32, 2, swizzle="qk"),
)

VARIANT = variant(TILING, CONFIGS)
VARIANT_F16 = variant(TILING, CONFIGS, narrow=True)
VARIANTS = [VARIANT, VARIANT_F16]
