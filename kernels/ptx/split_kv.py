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
    config(128, 32, 1, swizzle="q"),
    config(64, 32, 2, grid="heads"),
)

VARIANT = variant(TILING, CONFIGS)
VARIANT_F16 = variant(TILING, CONFIGS, narrow=True)
VARIANTS = [VARIANT, VARIANT_F16]
