"""What the Triton forwards share on the host: the blocks that a config becomes, and what they
declare alike.

A variant's file takes from here and from kernels/triton/common.py, so that an edit of one variant
concerns no other.
"""

import math

from kernels.triton.common import Blocks
from verify.variant import (
    Config,
    Contract,
    Maximum,
    Numerics,
    Output,
    Products,
    RowSum,
    Softmax,
    Support,
)

# fp32 products are FMA chains, not MMA: fewer rows and more warps, or the accumulators spill.  By
# (bucket, config's block_n). With 64 keys at bucket 256 they still do.
_FLOAT32 = {
    (64, 64): Blocks(32, 64, num_warps=8, num_stages=2),
    (64, 32): Blocks(32, 32, num_warps=4, num_stages=2),
    (128, 64): Blocks(32, 64, num_warps=16, num_stages=2),
    (128, 32): Blocks(16, 32, num_warps=8, num_stages=2),
    (256, 64): Blocks(16, 64, num_warps=8, num_stages=1),
    (256, 32): Blocks(16, 32, num_warps=8, num_stages=2),
}


def effective_blocks(config: Config, dtype: str, bucket: int, aligned: bool = True) -> Blocks:
    """The blocks launched for a config, which must name all four; block_n, the keys per rescale, is
    always the config's.  `bucket` is that of the larger head dim.

    A config is launched as declared for 16-bit dtypes, aligned, up to bucket 128.  Elsewhere it
    would spill, or outgrow the 99 KiB of shared memory of sm_86, 89 and 120.  On Hopper 32 rows
    also keep to mma.sync: the ptxas that Triton 3.6 and 3.7 ship (12.8) gives wgmma a wrong
    descriptor of V where the loop is not software-pipelined, as unaligned loads never are.
    """
    declared = Blocks.declared(config)
    if dtype == "float32":
        return _FLOAT32.get((max(bucket, 64), declared.block_n), declared)
    if aligned and bucket <= 128:
        return declared
    return Blocks(32, declared.block_n, num_warps=4 if aligned else 8, num_stages=2)


SUPPORT = Support(
    dtypes=("float16", "bfloat16", "float32"),
    head_dims=range(16, 257),
    masks=("full", "causal", "causal.tl", "window", "lengths", "documents", "prefix"),
    intersections=True,
    grouped_heads=True,
    separate_head_dim_v=True,
    min_seqlen=0,
    devices=("cpu", "cuda"),  # "cpu" is Triton's interpreter
    capability=(8, 0),
)

NUMERICS = Numerics(
    products=Products(operands="input", accumulator="float32"),
    softmax=Softmax(
        scores="float32",
        exp="ex2.approx",
        maximum=Maximum(key_order="whole_first"),
        row_sum=RowSum(apart=True, lse="log2"),
    ),
    output=Output(probability="input"),
)

CONTRACT = Contract(
    lse="natural",
    empty_row_out=0.0,
    empty_row_lse=-math.inf,
    deterministic=True,
    # NaN at a key that a row of the tile sees reaches, as 0 * NaN in P V, the rows of that tile
    # that do not; keys outside of those that the tile sees are not loaded.
    masked_values="padding",
    batch_invariant=True,
)
