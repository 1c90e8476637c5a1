"""FlashAttention-2 forward with log-sum-exp on Hopper, sharded along the rows over clusters of two
CTAs, in Gluon.

A cluster owns `block_m` rows of one head, and each of its CTAs half of them.  Both walk over the
same blocks of keys, and every tile of K and V is fetched once for both (`cluster`).  Walk,
arithmetic and order of steps are those of `hopper_forward` (docs/gluon.md).  On an H100 with Triton
3.8.0, 1,511 cases, none failing; the model of tests/harness/gluon_host.py runs it on the CPU.
"""

from dataclasses import replace
from functools import partial

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gluon import cluster, hopper_forward, host
from kernels.gluon.cluster import (
    CTAS,
    EACH_ITS_OWN,
    SHARED_ROWS,
    SHARED_TILE,
    SPLIT_ROWS,
    announce_barriers,
    await_partner,
    fetch_own,
    fetch_shared,
    let_go,
)
from kernels.gluon.hopper_forward import BUCKETS
from kernels.gluon.host import (
    TRITON,
    UNSPECIALIZED,
    bucket_of,
    builds_of,
    compile_launch,
    keywords,
    run,
    scalars,
)
from kernels.gluon.ring import await_tile, close_ring, hide, nth_block, open_ring
from kernels.gluon.rows import own_place, own_rows, store_lse, store_out
from kernels.gluon.softmax import lifted, scores
from kernels.masks import mask_build, mask_tables
from kernels.triton.common import Blocks, Launch
from kernels.triton.compile import compilable
from kernels.triton.tiles import blocks_of, key_walk
from verify.variant import (
    AttentionArgs,
    Build,
    Config,
    Workspace,
)


def _hopper_cluster_forward(  # noqa: PLR0915, PLR0917
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
    ROWS: gl.constexpr,  # of both CTAs
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    DTYPE: gl.constexpr = q.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[num_warps, 1],
        instr_shape=[16, BLOCK_N, 16],
        cga_layout=SPLIT_ROWS,
    )
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[num_warps, 1],
        instr_shape=[16, BLOCK_D, 16],
        cga_layout=SPLIT_ROWS,
    )
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    # 16 bytes per thread, whole rows per warp: of O on its way out, and of V where keys are hidden.
    OUT_LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_D, BLOCK_D // 8], [num_warps, 1], [1, 0], cga_layout=SPLIT_ROWS
    )
    V_LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_D, BLOCK_D // 8], [num_warps, 1], [1, 0], cga_layout=SHARED_TILE
    )
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    # All rows in each CTA, so that both find the same walk and exchange nothing.
    ALL_ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0], cga_layout=SHARED_ROWS)
    Q_TILE: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2, cga_layout=SPLIT_ROWS
    )
    TILE: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2, cga_layout=SHARED_TILE
    )
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout(EACH_ITS_OWN)

    tile, head, head_kv, batch = own_place(seqlen_q, heads_q, group, ROWS)
    sizes = seqlen_q, seqlen_kv, diagonal_low, diagonal_high
    _, low, high = own_rows(tile, tables, batch, sizes, KIND, ROWS, ALL_ROWS)
    first, last, walk = key_walk(low, high, seqlen_kv, BLOCK_N)
    total = blocks_of(walk, 0) + blocks_of(walk, 1)
    rows, low, high = own_rows(tile, tables, batch, sizes, KIND, ROWS, S_ROWS)

    q_tile = gl.allocate_shared_memory(DTYPE, [ROWS, BLOCK_D], Q_TILE)
    k_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_D], TILE)
    v_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_D], TILE)
    q_here = gl.allocate_shared_memory(gl.int64, [1, 2], BARRIERS)
    k_here = gl.allocate_shared_memory(gl.int64, [STAGES, 2], BARRIERS)
    v_here = gl.allocate_shared_memory(gl.int64, [STAGES, 2], BARRIERS)
    open_ring(q_here, 1)
    open_ring(k_here, STAGES)
    open_ring(v_here, STAGES)
    announce_barriers()
    batch32 = batch.to(gl.int32)
    m = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
    l = gl.zeros([ROWS], gl.float32, S_ROWS)  # noqa: E741 - the paper's name
    acc = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    await_partner()  # its barriers are there

    fetch_own(q, batch32, head, tile * ROWS, q_here.index(0), q_tile, total > 0)
    for stage in gl.static_range(STAGES):
        key = nth_block(walk, stage) * BLOCK_N
        more = stage < total
        fetch_shared(k, batch32, head_kv, key, k_here.index(stage), k_ring.index(stage), more)
        fetch_shared(v, batch32, head_kv, key, v_here.index(stage), v_ring.index(stage), more)

    if total > 0:
        mbarrier.wait(q_here.index(0), 0)
        slot = await_tile(k_here, 0, STAGES)
        k_tile = k_ring.index(slot)
        s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        let_go()  # the first tile of K
        x = scores(s, scale_log2, walk, 0, low, high, BLOCK_N, S_LAYOUT)
        await_partner()
        key = nth_block(walk, STAGES) * BLOCK_N
        fetch_shared(k, batch32, head_kv, key, k_here.index(slot), k_tile, total > STAGES)

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
            hide(v_tile, nth_block(walk, t - 1) * BLOCK_N, first, last, V_LAYOUT)
            acc = warpgroup_mma(p_tile, v_tile, acc, is_async=True)
            s, acc = warpgroup_mma_wait(0, deps=(s, acc))
            let_go()  # both tiles
            x = scores(s, scale_log2, walk, t, low, high, BLOCK_N, S_LAYOUT)
            await_partner()
            key = nth_block(walk, t + STAGES) * BLOCK_N
            more = t + STAGES < total
            fetch_shared(k, batch32, head_kv, key, k_here.index(slot), k_tile, more)
            key = nth_block(walk, t - 1 + STAGES) * BLOCK_N
            more = t - 1 + STAGES < total
            fetch_shared(v, batch32, head_kv, key, v_here.index(last_slot), v_tile, more)

        m, shift, alpha = lifted(x, m)
        p = gl.exp2(x - shift[:, None])
        l = l * alpha + gl.sum(p, 1)  # noqa: E741
        acc = acc * gl.convert_layout(alpha, O_ROWS)[:, None]
        p_tile = gl.convert_layout(p.to(DTYPE), P_LAYOUT)
        v_tile = v_ring.index(await_tile(v_here, total - 1, STAGES))
        hide(v_tile, nth_block(walk, total - 1) * BLOCK_N, first, last, V_LAYOUT)
        acc = warpgroup_mma(p_tile, v_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))

    let_go()  # all copies of the cluster have come: it waits for them no more

    place = batch, head, tile
    denominator = store_lse(lse, m, l, place, heads_q, rows, seqlen_q)
    o_tile = acc / gl.convert_layout(denominator, O_ROWS)[:, None]
    strides = out_batch, out_head, out_row, dim_v
    store_out(out, o_tile, strides, place, seqlen_q, ROWS, BLOCK_D, OUT_LAYOUT)

    await_partner()  # neither CTA leaves while a copy into the other may be under way
    close_ring(q_here, 1)
    close_ring(k_here, STAGES)
    close_ring(v_here, STAGES)


kernel = gluon.jit(_hopper_cluster_forward, **UNSPECIALIZED)


def descriptor(name: str, tensor: Tensor, rows: int, bucket: int, split: bool) -> TensorDescriptor:
    """What the copy engine needs to know of q, k or v: as `host.descriptor`, and whether
    the CTAs split the rows of a tile or both get all of them."""
    made = host.descriptor(name, tensor, rows, bucket)
    return replace(made, layout=replace(made.layout, cga_layout=[[0, 0, int(split), 0]]))


def effective_blocks(config: Config, bucket: int) -> Blocks:
    """The blocks of one CTA, which has its share of the config's rows."""
    return host.effective_blocks(replace(config, block_m=config.block_m // CTAS), bucket)


def launch(args: AttentionArgs, out: Tensor, lse: Tensor | None) -> Launch:
    """How the kernel is launched for these arguments, which have a query and a key; raises
    `Unsupported`."""
    mask = mask_build(args)
    bucket = bucket_of(args, BUCKETS)
    rows = args.config.block_m
    blocks = effective_blocks(args.config, bucket)
    return Launch(
        kernel,
        args.batch * args.heads_q * triton.cdiv(args.seqlen_q, rows),
        (
            descriptor("q", args.q, rows, bucket, split=True),
            descriptor("k", args.k, blocks.block_n, bucket, split=False),
            descriptor("v", args.v, blocks.block_n, bucket, split=False),
            *(out, lse, mask_tables(args, mask)),
            *scalars(args, out, mask),
        ),
        {"ROWS": rows, "num_ctas": CTAS} | keywords(mask, blocks, bucket),
    )


def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
    """Write O to `out` and the natural-log LSE to `lse`; raises `Unsupported` outside SUPPORT."""
    SUPPORT.check(args, out)
    run(launch, args, out, lse, cluster.unavailable)


def uncompilable() -> str | None:
    """Why nothing can be compiled here, or None."""
    return compilable() or cluster.unavailable()


def builds(arch: str) -> list[Build]:
    """Each config at each bucket, so that each dtype and kind of mask occurs; for Hopper alone."""
    return builds_of(VARIANT, _BUILDS, _compile, _SPILL_BUDGETS, ("HGMMA", "UTMALDG"), arch)


_BUILDS = (
    (0, "float16", 128, "full"),
    (0, "bfloat16", 64, "causal"),
    (0, "float16", 256, "window"),
    (1, "bfloat16", 128, "interval"),
    (1, "float16", 64, "full"),
    (1, "bfloat16", 256, "causal"),
    (2, "float16", 128, "causal"),
    (2, "bfloat16", 64, "interval"),
    (2, "float16", 256, "full"),
)

# Bytes per thread: S of two blocks and O are held at the same time.
_SPILL_BUDGETS = {  # with Triton 3.7
    "m256n128w8s2-ctas_2, float16, d 256, window": 1430,
    "m128n64w4s3-ctas_2, float16, d 256, full": 288,
}
if TRITON >= (3, 8):
    _SPILL_BUDGETS = {
        "m256n128w8s2-ctas_2, float16, d 128, full": 88,
        "m256n128w8s2-ctas_2, float16, d 256, window": 1592,
        "m256n64w8s2-ctas_2, bfloat16, d 256, causal": 136,
        "m128n64w4s3-ctas_2, float16, d 256, full": 356,
    }


_compile = partial(compile_launch, launch)

SUPPORT = hopper_forward.SUPPORT
_OPTIONS = (("ctas", CTAS),)

VARIANT = replace(
    hopper_forward.VARIANT,
    name="gluon-hopper-cluster-forward",
    forward=forward,
    # block_m: of a cluster, whose rows decide together which blocks are whole; num_warps: of a CTA.
    configs=(
        Config(block_m=256, block_n=128, num_warps=8, num_stages=2, options=_OPTIONS),
        Config(block_m=256, block_n=64, num_warps=8, num_stages=2, options=_OPTIONS),
        Config(block_m=128, block_n=64, num_warps=4, num_stages=3, options=_OPTIONS),
    ),
    available=cluster.unavailable,
    compilable=uncompilable,
    builds=builds,
)
