"""FlashAttention-2 forward with log-sum-exp on Hopper's own units, in Gluon.

S of the next block goes on in the tensor cores during the softmax of this one (docs/gluon.md).  The
option `turns` has two warpgroups take turns at the tensor cores (`hopper_turnstile`).
"""

import math
from dataclasses import replace
from functools import partial

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.gluon.hopper_turnstile import turnstile_forward
from kernels.gluon.host import (
    ROW_UNIT,
    TRITON,
    UNSPECIALIZED,
    bucket_of,
    builds_of,
    compile_launch,
    descriptor,
    effective_blocks,
    keywords,
    run,
    scalars,
)
from kernels.gluon.ring import await_tile, close_ring, fetch, hide, meet, nth_block, open_ring
from kernels.gluon.rows import own_place, own_rows, store_lse, store_out
from kernels.gluon.softmax import lifted, scores
from kernels.masks import mask_build, mask_tables
from kernels.triton.common import Launch
from kernels.triton.compile import compilable
from kernels.triton.tiles import blocks_of, key_walk
from verify.variant import (
    AttentionArgs,
    Build,
    Config,
    Contract,
    Maximum,
    Numerics,
    Output,
    Products,
    RowSum,
    Softmax,
    Support,
    Variant,
    Workspace,
)

CONSUMERS = 2  # warpgroups that take turns
BUCKETS = (64, 128, 256)  # no narrower: a row of a swizzled tile has 128 bytes


def _hopper_forward(  # noqa: PLR0915, PLR0917
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
    num_warps: gl.constexpr,
):
    DTYPE: gl.constexpr = q.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_N, 16]
    )
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_D, 16]
    )
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    # 16 bytes per thread, whole rows per warp: of O on its way out, and of V where keys are hidden.
    ROW_LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_D, BLOCK_D // 8], [num_warps, 1], [1, 0]
    )
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    tile, head, head_kv, batch = own_place(seqlen_q, heads_q, group, BLOCK_M)
    sizes = seqlen_q, seqlen_kv, diagonal_low, diagonal_high
    rows, low, high = own_rows(tile, tables, batch, sizes, KIND, BLOCK_M, S_ROWS)
    first, last, walk = key_walk(low, high, seqlen_kv, BLOCK_N)
    total = blocks_of(walk, 0) + blocks_of(walk, 1)

    q_tile = gl.allocate_shared_memory(DTYPE, [BLOCK_M, BLOCK_D], TILE)
    k_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_D], TILE)
    v_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_D], TILE)
    q_here = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    open_ring(q_here, 1)
    open_ring(k_here, STAGES)
    open_ring(v_here, STAGES)
    fence_async_shared()
    meet()

    batch32 = batch.to(gl.int32)
    fetch(q, batch32, head, tile * BLOCK_M, q_here.index(0), q_tile, total > 0)
    for stage in gl.static_range(STAGES):
        row_kv = nth_block(walk, stage) * BLOCK_N
        fetch(k, batch32, head_kv, row_kv, k_here.index(stage), k_ring.index(stage), stage < total)
        fetch(v, batch32, head_kv, row_kv, v_here.index(stage), v_ring.index(stage), stage < total)

    m = gl.full([BLOCK_M], float("-inf"), gl.float32, S_ROWS)
    l = gl.zeros([BLOCK_M], gl.float32, S_ROWS)  # noqa: E741 - the paper's name
    acc = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, O_LAYOUT)
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S_LAYOUT)
    if total > 0:
        mbarrier.wait(q_here.index(0), 0)
        slot = await_tile(k_here, 0, STAGES)
        k_tile = k_ring.index(slot)
        s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        meet()  # every warp has read the first tile of K
        row_kv = nth_block(walk, STAGES) * BLOCK_N
        fetch(k, batch32, head_kv, row_kv, k_here.index(slot), k_tile, total > STAGES)
        x = scores(s, scale_log2, walk, 0, low, high, BLOCK_N, S_LAYOUT)

        for t in range(1, total):
            m, shift, alpha = lifted(x, m)
            slot = await_tile(k_here, t, STAGES)
            k_tile = k_ring.index(slot)
            s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
            p = gl.exp2(x - shift[:, None])
            l = l * alpha + gl.sum(p, 1)  # noqa: E741
            acc = acc * gl.convert_layout(alpha, O_ROWS)[:, None]
            p_tile = gl.convert_layout(p.to(DTYPE), P_LAYOUT)
            last_slot = await_tile(v_here, t - 1, STAGES)
            v_tile = v_ring.index(last_slot)
            hide(v_tile, nth_block(walk, t - 1) * BLOCK_N, first, last, ROW_LAYOUT)
            acc = warpgroup_mma(p_tile, v_tile, acc, is_async=True)
            s, acc = warpgroup_mma_wait(0, deps=(s, acc))
            meet()  # every warp has read both tiles
            row_kv = nth_block(walk, t + STAGES) * BLOCK_N
            fetch(k, batch32, head_kv, row_kv, k_here.index(slot), k_tile, t + STAGES < total)
            row_kv = nth_block(walk, t - 1 + STAGES) * BLOCK_N
            more = t - 1 + STAGES < total
            fetch(v, batch32, head_kv, row_kv, v_here.index(last_slot), v_tile, more)
            x = scores(s, scale_log2, walk, t, low, high, BLOCK_N, S_LAYOUT)

        m, shift, alpha = lifted(x, m)
        p = gl.exp2(x - shift[:, None])
        l = l * alpha + gl.sum(p, 1)  # noqa: E741
        acc = acc * gl.convert_layout(alpha, O_ROWS)[:, None]
        p_tile = gl.convert_layout(p.to(DTYPE), P_LAYOUT)
        v_tile = v_ring.index(await_tile(v_here, total - 1, STAGES))
        hide(v_tile, nth_block(walk, total - 1) * BLOCK_N, first, last, ROW_LAYOUT)
        acc = warpgroup_mma(p_tile, v_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        meet()  # no warp waits at a barrier any more

    close_ring(q_here, 1)
    close_ring(k_here, STAGES)
    close_ring(v_here, STAGES)

    place = batch, head, tile
    denominator = store_lse(lse, m, l, place, heads_q, rows, seqlen_q)
    o_tile = acc / gl.convert_layout(denominator, O_ROWS)[:, None]
    strides = out_batch, out_head, out_row, dim_v
    store_out(out, o_tile, strides, place, seqlen_q, BLOCK_M, BLOCK_D, ROW_LAYOUT)


kernel = gluon.jit(_hopper_forward, **UNSPECIALIZED)
turnstile_kernel = gluon.jit(turnstile_forward, **UNSPECIALIZED)


def launch(args: AttentionArgs, out: Tensor, lse: Tensor | None) -> Launch:
    """How the kernel is launched for these arguments, which have a query and a key; raises
    `Unsupported`."""
    mask = mask_build(args)
    bucket = bucket_of(args, BUCKETS)
    blocks = effective_blocks(args.config, bucket)
    takes_turns = bool(dict(args.config.options).get("turns", 0))
    rows = blocks.block_m
    if takes_turns:  # each consumer has half of the rows, and half of the warps
        rows //= CONSUMERS
        blocks = replace(blocks, num_warps=blocks.num_warps // CONSUMERS)
    return Launch(
        turnstile_kernel if takes_turns else kernel,
        args.batch * args.heads_q * triton.cdiv(args.seqlen_q, blocks.block_m),
        (
            descriptor("q", args.q, rows, bucket),
            descriptor("k", args.k, blocks.block_n, bucket),
            descriptor("v", args.v, blocks.block_n, bucket),
            *(out, lse, mask_tables(args, mask)),
            *scalars(args, out, mask),
        ),
        {"BLOCK_M": blocks.block_m} | keywords(mask, blocks, bucket),
    )


def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
    """Write O to `out` and the natural-log LSE to `lse`; raises `Unsupported` outside SUPPORT."""
    SUPPORT.check(args, out)
    run(launch, args, out, lse)


def builds(arch: str) -> list[Build]:
    """Each config at each bucket, so that each dtype and kind of mask occurs; for Hopper alone,
    whose instructions no other generation has."""
    return builds_of(
        replace(VARIANT, configs=CONFIGS),
        _BUILDS,
        _compile,
        _SPILL_BUDGETS,
        ("HGMMA", "UTMALDG"),
        arch,
    )


_BUILDS = (
    (0, "float16", 128, "full"),
    (0, "bfloat16", 128, "causal"),
    (0, "bfloat16", 64, "full"),
    (0, "float16", 64, "interval"),
    (0, "float16", 256, "causal"),
    (1, "bfloat16", 128, "causal"),
    (1, "float16", 256, "full"),
    (2, "bfloat16", 128, "window"),
    (2, "float16", 128, "interval"),
    (2, "float16", 64, "causal"),
    (2, "bfloat16", 256, "full"),
    (2, "float16", 256, "window"),
    (3, "float16", 128, "causal"),
    (3, "bfloat16", 64, "interval"),
    (4, "float16", 128, "full"),
    (4, "bfloat16", 64, "causal"),
    (4, "float16", 256, "causal"),
    (5, "bfloat16", 128, "window"),
    (5, "float16", 256, "interval"),
)

# Bytes per thread, with Triton 3.6 and 3.7: S of two blocks and O are held at the same time, of 255
# registers 192 at D = 128 (what is spilled there belongs to the edges) and 256 at D = 256.
_SPILL_BUDGETS = {
    "m128n128w8s2, float16, d 128, full": 128,
    "m128n128w8s2, bfloat16, d 128, causal": 128,
    "m128n128w8s2, float16, d 256, causal": 1408,
    "m64n64w4s3, bfloat16, d 256, full": 408,
    "m64n128w4s1, float16, d 128, causal": 100,
    "m64n64w4s3, float16, d 256, window": 456,
    "m128n128w8s2-turns_1, float16, d 256, causal": 3344,
    "m128n64w8s2-turns_1, float16, d 256, interval": 216,
}
if TRITON >= (3, 8):
    _SPILL_BUDGETS |= {
        "m128n128w8s2, float16, d 256, causal": 1436,
        "m128n64w8s2, float16, d 256, full": 8,
        "m64n64w4s3, bfloat16, d 256, full": 520,
        "m64n128w4s1, float16, d 128, causal": 160,
    }


_compile = partial(compile_launch, launch)

SUPPORT = Support(
    dtypes=("float16", "bfloat16"),
    head_dims=range(ROW_UNIT, 257, ROW_UNIT),
    masks=("full", "causal", "causal.tl", "window", "lengths", "documents", "prefix"),
    intersections=True,
    grouped_heads=True,
    separate_head_dim_v=True,
    min_seqlen=0,
    layouts="aligned",
    devices=("cuda",),
    capability=(9, 0),
    max_capability=(9, 0),
)

# Run on the CPU by the model of tests/harness/gluon_partitions.py, too.
TURNSTILE = (
    Config(block_m=128, block_n=128, num_warps=8, num_stages=2, options=(("turns", 1),)),
    Config(block_m=128, block_n=64, num_warps=8, num_stages=2, options=(("turns", 1),)),
)
CONFIGS = (
    Config(block_m=128, block_n=128, num_warps=8, num_stages=2),
    Config(block_m=128, block_n=64, num_warps=8, num_stages=2),
    Config(block_m=64, block_n=64, num_warps=4, num_stages=3),
    Config(block_m=64, block_n=128, num_warps=4, num_stages=1),
    *TURNSTILE,
)

VARIANT = Variant(
    name="gluon-hopper-forward",
    family="gluon",
    forward=forward,
    configs=CONFIGS[:-1],
    support=SUPPORT,
    numerics=Numerics(
        products=Products(operands="input", instruction="wgmma", accumulator="float32"),
        softmax=Softmax(
            scores="float32",
            exp="ex2.approx",
            maximum=Maximum(key_order="whole_first"),
            row_sum=RowSum(apart=True, lse="log2"),
        ),
        output=Output(probability="input"),
    ),
    contract=Contract(
        lse="natural",
        empty_row_out=0.0,
        empty_row_lse=-math.inf,
        deterministic=True,
        # NaN at a key that a row of the tile sees reaches, as 0 * NaN in P V, the rows of that tile
        # that do not.
        masked_values="finite",
        batch_invariant=True,
    ),
    further_configs=lambda: CONFIGS[-1:],
    compilable=compilable,
    builds=builds,
    head_dim_buckets=BUCKETS,
)

WITNESS = (
    {
        "case": (
            "gluon-hopper-forward:m128n128w8s2:accuracy:hq=5,hkv=5,sq=520,skv=33,d=112,"
            "dtype=float16,mask=causal.tl,dist=low_rank,seed=39340188"
        ),
        "tensor": "out",
        "r": 0.962,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
