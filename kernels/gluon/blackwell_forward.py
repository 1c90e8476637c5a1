"""FlashAttention-2 forward with log-sum-exp on Blackwell's own units, in Gluon: S, P and O lie in
tensor memory, and warps are specialised.

One warp copies tiles, one issues the products (tcgen05), and `num_warps` make softmax and rescale
O.  They meet at mbarriers alone (docs/gluon.md).  Compiled, and run on the CPU by the model of
tests/harness/gluon_partitions.py; never run on a GPU.
"""

from dataclasses import replace
from functools import partial

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kernels.gluon import hopper_forward, host
from kernels.gluon.hopper_forward import BUCKETS
from kernels.gluon.host import (
    UNSPECIALIZED,
    bucket_of,
    builds_of,
    compile_launch,
    descriptor,
    keywords,
    run,
    scalars,
)
from kernels.gluon.partitions import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    copy_tiles,
    multiply,
    soften,
)
from kernels.gluon.partitions import (
    unavailable as without_tensor_memory,
)
from kernels.gluon.ring import close_ring, meet, open_ring
from kernels.gluon.rows import own_place, own_rows
from kernels.masks import mask_build, mask_tables
from kernels.triton.common import Blocks, Launch
from kernels.triton.compile import compilable
from kernels.triton.tiles import key_walk
from verify.variant import (
    AttentionArgs,
    Build,
    Config,
    Workspace,
)

COLUMNS = 512  # of tensor memory, 32 bits in each of 128 rows


def _blackwell_forward(  # noqa: PLR0915, PLR0917
    q,  # descriptors of (batch, heads_q, seqlen_q, head_dim)
    k,  # and (batch, heads_kv, seqlen_kv, head_dim)
    v,
    out,  # (batch, heads_q, seqlen_q, head_dim_v)
    lse,  # float32 (batch, heads_q, seqlen_q), contiguous
    tables,  # of the keys that rows see
    out_batch: gl.int64,  # strides of out, and head_dim_v, in units of ROW_UNIT elements
    out_head: gl.int64,
    out_row: gl.int64,
    dim_v: gl.int32,
    heads_q: gl.int32,
    group: gl.int32,
    seqlen_q: gl.int32,
    seqlen_kv: gl.int32,
    diagonal_low: gl.int32,
    diagonal_high: gl.int32,
    scale_log2: gl.float32,
    KIND: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    SIDES: gl.constexpr,  # tiles of S at once
    num_warps: gl.constexpr,
):
    DTYPE: gl.constexpr = q.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    S_MEMORY: gl.constexpr = TensorMemoryLayout([BLOCK_M, BLOCK_N], col_stride=1)
    O_MEMORY: gl.constexpr = TensorMemoryLayout([BLOCK_M, BLOCK_D], col_stride=1)
    ALL_ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])

    tile, head, head_kv, batch = own_place(seqlen_q, heads_q, group, BLOCK_M)
    sizes = seqlen_q, seqlen_kv, diagonal_low, diagonal_high
    _, low, high = own_rows(tile, tables, batch, sizes, KIND, BLOCK_M, ALL_ROWS)
    first, last, walk = key_walk(low, high, seqlen_kv, BLOCK_N)

    q_tile = gl.allocate_shared_memory(DTYPE, [BLOCK_M, BLOCK_D], TILE)
    k_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_D], TILE)
    v_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_D], TILE)
    s_memory = allocate_tensor_memory(gl.float32, [SIDES, BLOCK_M, BLOCK_N], S_MEMORY)
    p_memory = allocate_tensor_memory(DTYPE, [BLOCK_M, BLOCK_N], S_MEMORY)
    o_memory = allocate_tensor_memory(gl.float32, [BLOCK_M, BLOCK_D], O_MEMORY)
    q_here = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIERS)
    k_here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    v_here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    s_here = gl.allocate_shared_memory(gl.int64, [SIDES, 1], BARRIERS)
    s_free = gl.allocate_shared_memory(gl.int64, [SIDES, 1], BARRIERS)
    p_here = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIERS)
    o_here = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIERS)
    open_ring(q_here, 1)
    open_ring(k_here, STAGES)
    open_ring(v_here, STAGES)
    open_ring(k_free, STAGES)
    open_ring(v_free, STAGES)
    open_ring(s_here, SIDES)
    open_ring(s_free, SIDES)
    open_ring(p_here, 1)
    open_ring(o_here, 1)
    fence_async_shared()
    meet()

    rings = q_tile, k_ring, v_ring
    here = q_here, k_here, v_here
    free = k_free, v_free
    memory = s_memory, p_memory, o_memory
    turns = s_here, s_free, p_here, o_here
    outputs = out, lse, out_batch, out_head, out_row, dim_v, heads_q
    place = batch.to(gl.int32), head, head_kv, tile * BLOCK_M
    own = batch, head, tile
    edges = first, last
    gl.warp_specialize(
        [
            (
                soften,
                (
                    v_ring,
                    v_here,
                    memory,
                    turns,
                    outputs,
                    sizes,
                    tables,
                    own,
                    scale_log2,
                    walk,
                    edges,
                    KIND,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_D,
                    STAGES,
                    SIDES,
                    num_warps,
                ),
            ),
            (copy_tiles, ((q, k, v), rings, here, free, place, walk, BLOCK_N, STAGES)),
            (multiply, (rings, here, free, memory, turns, walk, STAGES, SIDES)),
        ],
        [1, 1],
        [40, 40],
    )

    close_ring(q_here, 1)
    close_ring(k_here, STAGES)
    close_ring(v_here, STAGES)
    close_ring(k_free, STAGES)
    close_ring(v_free, STAGES)
    close_ring(s_here, SIDES)
    close_ring(s_free, SIDES)
    close_ring(p_here, 1)
    close_ring(o_here, 1)


kernel = gluon.jit(_blackwell_forward, **UNSPECIALIZED)


def columns(block_n: int, bucket: int, sides: int) -> int:
    """Of tensor memory: `sides` tiles of S, one of P in 16 bits, and O."""
    return sides * block_n + block_n // 2 + bucket


def effective_blocks(config: Config, bucket: int) -> Blocks:
    """The blocks launched for a config: as declared, with as many stages as shared memory holds;
    the widest O takes 8 warps."""
    blocks = host.effective_blocks(config, bucket)
    return replace(blocks, num_warps=8) if bucket == BUCKETS[-1] else blocks


def launch(args: AttentionArgs, out: Tensor, lse: Tensor | None) -> Launch:
    """How the kernel is launched for these arguments, which have a query and a key; raises
    `Unsupported`."""
    mask = mask_build(args)
    bucket = bucket_of(args, BUCKETS)
    blocks = effective_blocks(args.config, bucket)
    sides = 2 if columns(blocks.block_n, bucket, 2) <= COLUMNS else 1
    return Launch(
        kernel,
        args.batch * args.heads_q * triton.cdiv(args.seqlen_q, blocks.block_m),
        (
            descriptor("q", args.q, blocks.block_m, bucket),
            descriptor("k", args.k, blocks.block_n, bucket),
            descriptor("v", args.v, blocks.block_n, bucket),
            *(out, lse, mask_tables(args, mask)),
            *scalars(args, out, mask),
        ),
        {"BLOCK_M": blocks.block_m, "SIDES": sides} | keywords(mask, blocks, bucket),
    )


def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
    """Write O to `out` and the natural-log LSE to `lse`; raises `Unsupported` outside SUPPORT."""
    SUPPORT.check(args, out)
    run(launch, args, out, lse, without_tensor_memory)


def uncompilable() -> str | None:
    """Why nothing can be compiled here, or None."""
    return compilable() or without_tensor_memory()


def unavailable() -> str | None:
    """Why the kernel cannot run here, or None."""
    generation = SUPPORT.capability[0]
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != generation:
        return f"compiled, never run: no device of compute capability {generation}.x was at hand"
    return without_tensor_memory()


def builds(arch: str) -> list[Build]:
    """Each config at each bucket, so that each dtype and kind of mask occurs; for the generation
    that has tensor memory alone."""
    return builds_of(VARIANT, _BUILDS, _compile, _SPILL_BUDGETS, ("UTCMMA", "UTMALDG"), arch)


_BUILDS = (
    (0, "float16", 128, "full"),
    (0, "bfloat16", 64, "causal"),
    (0, "float16", 256, "window"),
    (1, "bfloat16", 128, "interval"),
    (1, "float16", 64, "full"),
    (1, "bfloat16", 256, "causal"),
)


_SPILL_BUDGETS = {"m128n128w8s2, float16, d 256, window": 72}  # bytes per thread, Triton 3.7


_compile = partial(compile_launch, launch)

SUPPORT = replace(hopper_forward.SUPPORT, capability=(10, 0), max_capability=(10, 3))
_NUMERICS = hopper_forward.VARIANT.numerics

VARIANT = replace(
    hopper_forward.VARIANT,
    name="gluon-blackwell-forward",
    forward=forward,
    configs=(
        Config(block_m=128, block_n=128, num_warps=8, num_stages=2),
        Config(block_m=128, block_n=64, num_warps=4, num_stages=3),
    ),
    support=SUPPORT,
    numerics=replace(_NUMERICS, products=replace(_NUMERICS.products, instruction="tcgen05")),
    available=unavailable,
    compilable=uncompilable,
    builds=builds,
)
