"""FlashAttention-2 backward in Triton: dQ, dK and dV from the O and LSE that `flash_forward` saved.

Three kernels (Dao, arXiv 2307.08691, algorithm 2, with dQ in a kernel of its own instead of atomic
adds):

    delta = rowsum(dO O)                            in fp32, into a workspace
    for a block of keys, over the rows of every query head of the group that see one of them:
        x  = (softmax_scale log2 e) (q . k)         one fp32 product per score, as in the forward
        P  = 2^(x - lse log2 e)                     dV += round(P)^T dO
        dS = P (dO V^T - delta)                     dK += round(dS)^T Q
    for a block of rows, over the keys that they see: the same dS, dQ += round(dS) K

round() is to the inputs' dtype.  Every sum is one fp32 chain in a fixed order, that of dK and dV
through all heads of the group, so that the result repeats bit for bit; dQ and dK are multiplied by
softmax_scale once, at the end.  The block of keys is computed transposed, K Q^T and V dO^T: P^T and
dS^T then lie in registers as the next products take them.

Compiled without fp fusion, as the forward is: fused, x - lse log2 e would hold another x than that
whose sum the LSE is.

Masks, buckets and the aligned bit are the forward's.  Blocks that are seen whole come first and
need no mask, then the blocks at the edges; in a table of intervals every block counts as an edge,
and a block of keys looks up first which rows see it.  Rows that see no key of a block are not
loaded there, nor are keys that no row of a tile sees; where the mask hides a pair, P and dS are set
to 0, so that what lies there enters a sum as 0 times a number that the contract has finite.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.masks import mask_build, mask_tables
from kernels.triton import flash_forward
from kernels.triton.common import (
    BUCKETS,
    LOG2_E,
    Blocks,
    Launch,
    head_dim_bucket,
    is_aligned,
    sizes,
    steps,
)
from kernels.triton.compile import arguments, binary, expected, meta
from kernels.triton.flash_backward_kernels import (
    key_value_gradients,
    key_value_gradients_aligned,
    query_gradients,
    query_gradients_aligned,
    row_sums,
    row_sums_aligned,
)
from verify.variant import (
    AttentionArgs,
    Binary,
    Build,
    Config,
    GradientNumerics,
    GradientProducts,
    Gradients,
    GradientSoftmax,
    GradientSums,
    Saved,
    ScoreGradient,
    Variant,
    Workspace,
)

_DELTA_ROWS = 32  # rows per program of the first kernel


@dataclass(frozen=True)
class Walk:
    """What a config becomes for one dtype and head dim: the keys (or rows) that a program owns, and
    the rows (or keys) of one step of its walk."""

    owned: int
    walked: int
    num_warps: int
    num_stages: int


# What is launched instead of a config as declared, by its block_n.  A step holds four operands in
# registers, so that more rows spill.  32 keys (or rows) of their own keep builds that are not
# software-pipelined to mma.sync (see `flash_forward`).
_WIDE = {
    128: Walk(128, 16, num_warps=8, num_stages=2),
    64: Walk(64, 16, num_warps=8, num_stages=2),
}
_NARROW = {
    128: Walk(32, 32, num_warps=8, num_stages=2),
    64: Walk(32, 16, num_warps=8, num_stages=2),
}
# fp32 products are FMA chains, not MMA: smaller blocks, by (bucket, block_n).
_FLOAT32 = {
    (64, 128): Walk(64, 32, num_warps=8, num_stages=2),
    (64, 64): Walk(32, 32, num_warps=8, num_stages=2),
    (128, 128): Walk(32, 16, num_warps=8, num_stages=2),
    (128, 64): Walk(16, 16, num_warps=8, num_stages=2),
    (256, 128): Walk(16, 16, num_warps=16, num_stages=2),
    (256, 64): Walk(16, 16, num_warps=8, num_stages=1),
}


def effective_blocks(config: Config, dtype: str, bucket: int, aligned: bool = True) -> Walk:
    """The blocks launched for a config, which must name all four; `bucket` is that of the larger
    head dim.

    dK and dV: a program owns block_n keys and walks block_m rows at a time.  dQ is the mirror
    image: it owns block_n rows and walks block_m keys.  A config is launched as declared for 16-bit
    dtypes, aligned, up to bucket 64.
    """
    given = Blocks.declared(config)
    declared = Walk(given.block_n, given.block_m, given.num_warps, given.num_stages)
    if dtype == "float32":
        return _FLOAT32.get((max(bucket, 64), declared.owned), declared)
    if aligned and bucket <= 64:
        return declared
    return (_WIDE if aligned and bucket <= 128 else _NARROW).get(declared.owned, declared)


def launches(
    args: AttentionArgs, saved: Saved, dout: Tensor, gradients: Gradients, delta: Tensor
) -> tuple[Launch, Launch, Launch]:
    """How the kernels are launched, in their order; raises `Unsupported` outside SUPPORT."""
    SUPPORT.check_backward(args, saved, dout, gradients)
    mask = mask_build(args)
    tables = mask_tables(args, mask)
    bucket = head_dim_bucket(max(args.head_dim, args.head_dim_v))
    fast = is_aligned(args, saved.out, dout, *gradients.by_name().values())
    blocks = effective_blocks(args.config, args.dtype, bucket, fast)
    inputs = args.q, args.k, args.v, dout
    numbers = args.softmax_scale * LOG2_E, args.softmax_scale

    def walk(
        kernel: Any, heads: int, seqlen: int, sides: tuple[int, int], *outputs: Tensor
    ) -> Launch:
        tiles = Blocks(*sides, blocks.num_warps, blocks.num_stages)
        return Launch(
            kernel,
            args.batch * heads * triton.cdiv(seqlen, blocks.owned),
            (
                *inputs,
                *outputs,
                saved.lse,
                delta,
                tables,
                steps(*inputs, *outputs, aligned=fast),
                *sizes(args, heads, mask, aligned=fast),
                *numbers,
            ),
            tiles.keywords(mask.kind, bucket, fast),
        )

    return (
        Launch(
            row_sums_aligned if fast else row_sums,
            args.batch * args.heads_q * triton.cdiv(args.seqlen_q, _DELTA_ROWS),
            (
                saved.out,
                dout,
                delta,
                steps(saved.out, dout, aligned=fast),
                *sizes(args, args.heads_q, mask, aligned=fast),
            ),
            {
                "ALIGNED": fast,
                "ROWS": _DELTA_ROWS,
                "BLOCK_DV": bucket,
                "num_warps": 4,
                "enable_fp_fusion": False,
            },
        ),
        walk(
            key_value_gradients_aligned if fast else key_value_gradients,
            args.heads_kv,
            args.seqlen_kv,
            (blocks.walked, blocks.owned),
            gradients.dk,
            gradients.dv,
        ),
        walk(
            query_gradients_aligned if fast else query_gradients,
            args.heads_q,
            args.seqlen_q,
            (blocks.owned, blocks.walked),
            gradients.dq,
        ),
    )


def backward(
    args: AttentionArgs, saved: Saved, dout: Tensor, gradients: Gradients, workspace: Workspace
) -> None:
    """Write dQ, dK and dV from the O and natural-log LSE of `flash_forward`; raises `Unsupported`
    outside SUPPORT."""
    kernels = launches(args, saved, dout, gradients, workspace["delta"])
    with torch.cuda.device_of(args.q):
        for kernel in kernels:
            kernel.run()


def backward_workspace(args: AttentionArgs) -> dict[str, tuple[tuple[int, ...], str]]:
    """delta, one sum per row."""
    return {"delta": ((args.batch, args.heads_q, args.seqlen_q), "float32")}


def builds(arch: str) -> list[Build]:
    """Both walks of each dtype by config, bucket, mask and alignment, so that each occurs, and the
    sums of rows."""
    found = []
    for kernel, number, dtype, head_dim, kind, aligned in _BUILDS:
        config = VARIANT.configs[number]
        name = (
            f"{_KERNELS[kernel]}, {config.name}, {dtype}, d {head_dim},"
            f" {kind}{'' if aligned else ', unaligned'}"
        )
        compile_ = partial(_compile, kernel, config, dtype, head_dim, kind, aligned, arch)
        budget = _SPILL_BUDGETS.get(name, {}).get(arch, 0)
        # The sums of rows multiply no matrices.
        expects = expected(dtype, aligned=aligned) if kernel else ()
        found.append(Build(name, compile_, budget, expects))
    return found


# Bytes per thread: the most of Triton 3.6 (the larger ones) and 3.7.
_SPILL_BUDGETS = {
    "dk dv, m32n128w8s2, float32, d 64, interval, unaligned": {
        "sm_80": 2192,
        "sm_86": 1412,
        "sm_89": 1412,
        "sm_90a": 192,
        "sm_100a": 40,
        "sm_120a": 104,
    },
    "dk dv, m32n128w8s2, float16, d 128, causal": {"sm_100a": 1040},
    "dk dv, m32n128w8s2, bfloat16, d 64, window": {"sm_100a": 792},
    "dk dv, m16n64w4s2, bfloat16, d 128, interval": {"sm_100a": 172},
}


_KERNELS = ("row sums", "dk dv", "dq")
_BUILDS = (
    (0, 0, "float16", 128, "full", True),
    (0, 1, "float32", 64, "full", False),
    (1, 0, "float16", 128, "causal", True),
    (1, 0, "bfloat16", 64, "window", True),
    (1, 1, "float16", 64, "full", True),
    (1, 1, "bfloat16", 128, "interval", True),
    (1, 0, "float32", 64, "interval", False),
    (2, 0, "bfloat16", 128, "interval", True),
    (2, 0, "float16", 64, "full", True),
    (2, 1, "bfloat16", 64, "causal", True),
    (2, 1, "float16", 128, "window", False),
    (2, 1, "float32", 128, "full", True),
)


def _compile(
    kernel: int, config: Config, dtype: str, head_dim: int, kind: str, aligned: bool, arch: str
) -> Binary:
    args = arguments(config, dtype, head_dim, kind, aligned=aligned)
    out, dout, dq, dk, dv = (
        meta(tuple(x.shape), dtype, aligned=aligned)
        for x in (args.q, args.q, args.q, args.k, args.v)
    )
    lse, delta = (meta(tuple(args.q.shape[:3]), "float32") for _ in range(2))
    return binary(launches(args, Saved(out, lse), dout, Gradients(dq, dk, dv), delta)[kernel], arch)


SUPPORT = flash_forward.SUPPORT

VARIANT = Variant(
    name="triton-flash-backward",
    family="triton",
    backward=backward,
    saved_by=flash_forward.VARIANT,
    configs=(
        Config(block_m=32, block_n=128, num_warps=8, num_stages=2),
        Config(block_m=16, block_n=64, num_warps=4, num_stages=2),
    ),
    support=SUPPORT,
    gradients=GradientNumerics(
        products=GradientProducts(operands="input"),
        softmax=GradientSoftmax(exp="ex2.approx", probability="input"),
        score_gradient=ScoreGradient(dtype="input"),
        sums=GradientSums(block_m=0, block_n=0, group="float32", roundings=1),
    ),
    backward_workspace=backward_workspace,
    builds=builds,
    head_dim_buckets=BUCKETS,
)

WITNESS = (
    {
        "case": (
            "triton-flash-backward:m16n64w4s2:gradients:hq=2,hkv=2,sq=400,skv=400,d=210,dv=238,"
            "dtype=float16,mask=prefix.15,dist=low_rank,seed=910"
        ),
        "tensor": "dk",
        "r": 0.995,
        "device": "Intel(R) Xeon(R) Processor",
        "date": "2026-11-22",
    },
    {
        "case": (
            "triton-flash-backward:m16n64w4s2:gradients:hq=2,hkv=2,sq=400,skv=400,d=210,dv=238,"
            "dtype=float16,mask=prefix.15,dist=low_rank,seed=910"
        ),
        "tensor": "dk",
        "r": 0.995,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
