"""FlashAttention-2 forward with log-sum-exp from raw PTX instructions: "split-q", warps share the
rows and see all keys.

A block of four warps owns 64 query rows of one head, 16 rows a warp, and walks over the keys in
blocks of BLOCK_N (Dao, arXiv 2307.08691, algorithm 1 and section 3.3).  Since no two warps share a
row, softmax statistics never leave a warp:

    x     = (softmax_scale log2 e) (q . k)          one fp32 product per score, so that x - m is
    exactly 0 at the maximum m'    = max(m, max x) p     = 2^(x - m'),  alpha = 2^(m - m')
    ex2.approx l     = alpha l + sum p                         p in fp32, before it is rounded acc
    = alpha acc + round(p) v                  p rounded to v's dtype, products accumulated in fp32 O
    = acc (1 / l),  LSE = ln 2 (m + log2 l)   once, at the end

**Fragments** (layouts in kernels/cuda/ptx.cuh; g = lane / 4, t = lane % 4).  mma.m16n8k16 makes 16
rows x 8 columns: a lane holds rows g and g + 8, columns 2t and 2t + 1, of S as of O.  So four lanes
hold a row: its maximum takes two shuffles per block of keys; its sum is kept per lane and added up
at the end.  Two neighbouring 8-key tiles of S, exponentiated and rounded, are register for register
the 16x16 left operand of P V.  Q stays in registers from the start.

**Shared memory**: the tile of Q, then STAGES tiles of K, then STAGES of V, rows of 2 head_dim bytes
without padding.  Chunk c (16 bytes) of row r lies at place c ^ (r % 8) of its row.  So the eight
rows of an 8x8 matrix, which ldmatrix reads at once, lie in different banks, all 32 of them, and so
do the eight chunks that eight lanes of a copy write at once.  V is transposed on its way to
registers (ldmatrix.trans); K, whose rows are the columns of the product's right operand, is not.

**Copies** are cp.async of 16 bytes, zeros past the last key that some row of the tile sees, so that
nothing beyond is read. With one stage, V(i) travels while S(i) and its softmax are computed, K(i +
1) during P V(i).  With two, K(i + 1) travels from S(i) to S(i + 1) and V(i + 1) from P V(i) to P
V(i + 1).  Either way there are two barriers per block: each makes the copies of all threads visible
to all, and keeps the next copy from overwriting what a slower warp still reads.

Causal blocks that every row of the tile sees whole come first and are not masked; those that no row
sees are not visited.

A build is chosen by dtype, head dim, causal or not, BLOCK_N and stages; lengths, strides, scale and
heads are plain arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.cuda.family import Arguments
from references.masks import Causal
from verify.cuda.compile import (
    Kernel,
    Source,
    available,
    compilable,
    compile_source,
    device_arch,
    launch,
    load,
)
from verify.variant import (
    AttentionArgs,
    Build,
    Config,
    Contract,
    Numerics,
    Output,
    Products,
    Resources,
    RowSum,
    Softmax,
    Support,
    Unsupported,
    Variant,
    Workspace,
)

BLOCK_M = 64  # query rows of a block
WARPS = 4
HEAD_DIMS = (64, 128)


def source(config: Config, dtype: str, head_dim: int, causal: bool) -> Source:
    """One build of split_q.cu."""
    defines = {
        "FORMAT": dtype,
        "HEAD_DIM": head_dim,
        "BLOCK_N": config.block_n,
        "STAGES": config.num_stages,
        "CAUSAL": int(causal),
    }
    macros = tuple((name, str(value)) for name, value in defines.items())
    return Source(Path(__file__).with_name("split_q.cu"), "split_q", macros)


def shared_bytes(config: Config, head_dim: int) -> int:
    """Dynamic shared memory of a block: one tile of Q, and one of K and of V per stage."""
    return 2 * head_dim * (BLOCK_M + 2 * config.num_stages * config.block_n)


@cache
def _kernel(config: Config, dtype: str, head_dim: int, causal: bool, arch: str) -> Kernel:
    return load(compile_source(source(config, dtype, head_dim, causal), arch))


def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
    """Write O to `out` and the natural-log LSE to `lse`; raises `Unsupported` outside SUPPORT."""
    SUPPORT.check(args, out)
    if args.config not in CONFIGS:
        raise Unsupported(
            "config",
            f"{args.config.name} is none of {', '.join(config.name for config in CONFIGS)}",
        )
    if args.seqlen_q == 0:
        return
    assert lse is not None
    grid = args.batch * args.heads_q * math.ceil(args.seqlen_q / BLOCK_M)
    with torch.cuda.device_of(args.q):
        causal = isinstance(args.mask, Causal)
        kernel = _kernel(args.config, args.dtype, args.head_dim, causal, device_arch(args.q.device))
        arguments = Arguments.of(args, out, lse, in_bytes=True)
        launch(kernel, (grid,), (32 * WARPS,), shared_bytes(args.config, args.head_dim), arguments)


def builds(arch: str) -> list[Build]:
    """Every build for that architecture."""

    def build(config: Config, dtype: str, head_dim: int, causal: bool) -> Build:
        def compile_() -> Resources:
            static = compile_source(source(config, dtype, head_dim, causal), arch).resources
            return replace(static, shared=static.shared + shared_bytes(config, head_dim))

        return Build(
            f"{config.name}-{dtype}-d{head_dim}-{'causal' if causal else 'full'}", compile_
        )

    return [build(*choice) for choice in _choices()]


def _choices() -> Iterator[tuple[Config, str, int, bool]]:
    for config in CONFIGS:
        for dtype in SUPPORT.dtypes:
            for head_dim in HEAD_DIMS:
                for causal in (False, True):
                    yield config, dtype, head_dim, causal


CONFIGS = (
    Config(block_m=BLOCK_M, block_n=64, num_warps=WARPS, num_stages=2),
    Config(block_m=BLOCK_M, block_n=32, num_warps=WARPS, num_stages=1),
)

SUPPORT = Support(
    dtypes=("float16", "bfloat16"),
    head_dims=HEAD_DIMS,
    masks=("full", "causal", "causal.tl"),
    grouped_heads=True,
    min_seqlen=0,
    layouts="aligned",
    devices=("cuda",),
    capability=(8, 0),
)

VARIANT = Variant(
    name="ptx-split-q",
    family="ptx",
    forward=forward,
    configs=CONFIGS,
    support=SUPPORT,
    numerics=Numerics(
        products=Products(operands="input", instruction="mma.sync", accumulator="float32"),
        softmax=Softmax(
            scores="float32",
            exp="ex2.approx",
            row_sum=RowSum(lanes=4),  # a row's columns lie in four neighbouring lanes
        ),
        output=Output(probability="input"),
    ),
    contract=Contract(
        lse="natural",
        empty_row_out=0.0,
        empty_row_lse=-math.inf,
        deterministic=True,
        masked_values="finite",
        batch_invariant=True,
    ),
    available=available,
    builds=builds,
    compilable=compilable,
    head_dim_buckets=HEAD_DIMS,
)

WITNESS = (
    {
        "case": (
            "ptx-split-q:m64n64w4s2:accuracy:b=2,hq=6,hkv=3,sq=159,skv=159,d=128,dtype=float16,"
            "scale=-1.0,dist=one_hot_v,seed=2630"
        ),
        "tensor": "out",
        "r": 0.996,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
