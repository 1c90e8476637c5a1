"""What the Gluon forwards share on the host: descriptors, launches and builds."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.masks import MaskBuild
from kernels.triton.common import LOG2_E, Blocks, Launch, counts
from kernels.triton.compile import arguments, binary, meta
from verify.variant import (
    AttentionArgs,
    Binary,
    Build,
    Config,
    Unsupported,
    Variant,
    arch_named,
)

TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
SHARED_BYTES = 227 * 1024  # of a block on Hopper and on Blackwell
ROW_UNIT = 8  # elements of 16 bits; strides of out and head dims are multiples of it
SWIZZLE_BYTES = 128  # the most of a row of a tile
# How `gluon.jit` takes the kernels' arguments: a build serves all sizes and strides.
UNSPECIALIZED: dict[str, Any] = {
    "do_not_specialize": [
        *("out_batch", "out_head", "out_row", "dim_v", "heads_q", "group"),
        *("seqlen_q", "seqlen_kv", "diagonal_low", "diagonal_high"),
    ],
    "do_not_specialize_on_alignment": ["lse"],
}


def bucket_of(args: AttentionArgs, buckets: Sequence[int]) -> int:
    """The width of the tiles: one bucket for both head dims."""
    largest = max(args.head_dim, args.head_dim_v)
    return next(bucket for bucket in buckets if largest <= bucket)


def effective_blocks(config: Config, bucket: int, itemsize: int = 2) -> Blocks:
    """The blocks of a config: as declared, with as many stages as shared memory holds beside the
    tile of Q and the barriers; itemsize: bytes of an element."""
    blocks = Blocks.declared(config)
    stage = 2 * itemsize * blocks.block_n * bucket
    barriers = 1024
    room = (SHARED_BYTES - barriers - itemsize * blocks.block_m * bucket) // stage
    return replace(blocks, num_stages=min(blocks.num_stages, room))


def descriptor(name: str, tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """What the copy engine needs to know of q, k or v: 4 dimensions, and tiles of (rows, columns).

    A row of a tile is one piece of its swizzle, or several of 128 bytes.  A dimension that repeats
    the same elements has size 1 there (see `kernels.gluon.ring.fetch`).  Raises `Unsupported` if
    rows do.
    """
    shape, strides = list(tensor.shape), list(tensor.stride())
    if shape[2] > 1 and strides[2] == 0:
        raise Unsupported(f"layout_{name}", "the copy engine cannot repeat a row: make it whole")
    for dim in range(3):
        if shape[dim] == 1 or strides[dim] == 0:
            shape[dim], strides[dim] = 1, columns
    strides[3] = 1
    itemsize = tensor.dtype.itemsize
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=min(columns * itemsize, SWIZZLE_BYTES),
        element_bitwidth=8 * itemsize,
        rank=4,
    )
    return TensorDescriptor(tensor, shape, strides, [1, 1, rows, columns], layout)


def descriptor_even_first(name: str, tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """`descriptor` of k with an even number of rows, for `kernels.gluon.even_first`: rows of even
    numbers and of odd ones are a dimension of their own."""
    whole = descriptor(name, tensor, rows, columns)
    *outer, seqlen, dim = whole.shape
    *steps, step, _ = whole.strides
    return TensorDescriptor(
        tensor,
        [*outer, 2, seqlen // 2, dim],
        [*steps, step, 2 * step, 1],
        [1, 1, 2, rows // 2, columns],
        replace(whole.layout, rank=5),
    )


def scalars(args: AttentionArgs, out: Tensor, mask: MaskBuild) -> tuple[Any, ...]:
    """The last arguments of a kernel: out's strides and head_dim_v in units of ROW_UNIT, the
    counts, and the scale in base 2."""
    return (
        *(step // ROW_UNIT for step in out.stride()[:3]),
        args.head_dim_v // ROW_UNIT,
        *counts(args, args.heads_q, mask),
        args.softmax_scale * LOG2_E,
    )


def keywords(mask: MaskBuild, blocks: Blocks, bucket: int) -> dict[str, Any]:
    """The keywords of a launch that every forward takes; its rows come beside them."""
    return {
        "KIND": mask.kind,
        "BLOCK_N": blocks.block_n,
        "BLOCK_D": bucket,
        "STAGES": blocks.num_stages,
        "num_warps": blocks.num_warps,
        "enable_fp_fusion": False,
    }


Launcher = Callable[[AttentionArgs, Tensor, Tensor | None], Launch]


def run(
    launch: Launcher,
    args: AttentionArgs,
    out: Tensor,
    lse: Tensor | None,
    unavailable: Callable[[], str | None] = lambda: None,
) -> None:
    """Launch a forward, if there is a row; without a key write O = 0 and LSE = -inf, since the copy
    engine knows no empty tensor.  Raises `Unsupported` where it is unavailable."""
    if args.seqlen_q == 0:
        return
    if args.seqlen_kv == 0:
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
        return
    reason = unavailable()
    if reason is not None:
        raise Unsupported("device", reason)
    kernel_launch = launch(args, out, lse)
    with torch.cuda.device_of(args.q):
        kernel_launch.run()


def builds_of(
    variant: Variant,
    shapes: Iterable[tuple[int, str, int, str, *tuple[str, ...]]],
    compile_: Callable[..., Binary],
    budgets: Mapping[str, int],
    instructions: tuple[str, ...],
    arch: str,
    suffix: str = "",
) -> list[Build]:
    """The builds of a forward for its own generation; for any other none.

    shapes: number of a config, dtype, head dim, kind of mask and, where it is not q's, dtype of O.
    compile_: is called with the config, the rest of a shape, and arch.
    budgets: bytes that a thread may spill, by the build's name, which ends with `suffix`.
    instructions: those it must have.
    """
    if arch_named(arch).capability != variant.support.capability:
        return []
    found = []
    for number, dtype, head_dim, kind, *dtype_out in shapes:
        config = variant.configs[number]
        name = f"{config.name}, {dtype}, d {head_dim}, {kind}"
        name += "".join(f", out {other}" for other in dtype_out) + suffix
        compile_build = partial(compile_, config, dtype, head_dim, kind, *dtype_out, arch)
        found.append(Build(name, compile_build, budgets.get(name, 0), instructions))
    return found


def compile_launch(
    launch: Launcher, config: Config, dtype: str, head_dim: int, kind: str, arch: str
) -> Binary:
    """The binary of such a build, for O in q's dtype."""
    args = arguments(config, dtype, head_dim, kind)
    out = meta(tuple(args.q.shape), dtype)
    lse = meta(tuple(args.q.shape[:3]), "float32")
    return binary(launch(args, out, lse), arch)
