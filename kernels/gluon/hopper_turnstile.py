"""The turnstile of the Hopper forward: two warpgroups take turns at the tensor cores, so that the
one makes its softmax while the other multiplies.  Device code in Gluon.

A program owns 2 `ROWS` query rows of one head, each consumer half of them, and one warp copies for
both.  All walk over the same blocks of keys; the walk is that of `hopper_forward` (docs/gluon.md).
In a turn a consumer issues S of the next block and O of this one.  It waits for S alone, and makes
P of the next block while O may still be under way (FlashAttention-3, arXiv 2407.08608, sections 3.1
and 3.2).  A score and its exponent are one fused multiply-add (`softmax`).

| barrier | arrivals | waits |
|---|---|---|
| q_here, k_here, v_here | the bytes of a tile have come | the consumers |
| k_free, v_free | 2: either consumer's products have read the tile | copy_for_two |
| turns[who] | the other consumer has issued its products | that consumer, before its own |

The first consumer alone hides values that no row sees.  It does so before its turn, so that the
other one finds them hidden in the turn after it.  The first one takes a turn behind its last, which
is empty: the other arrives at no barrier whose owner has left.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.gluon.partitions import await_free
from kernels.gluon.ring import (
    await_tile,
    close_ring,
    fetch,
    hide,
    meet,
    nth_block,
    open_ring,
    partly_seen,
)
from kernels.gluon.rows import own_place, own_rows, store_lse, store_out
from kernels.gluon.softmax import lifted_signed, signed_scale, signed_scores
from kernels.triton.tiles import blocks_of, key_walk


@gluon.jit
def open_shared_ring(barriers, STAGES: gl.constexpr):
    """Make the barriers of slots that both consumers free ready: two arrivals per round."""
    for slot in gl.static_range(STAGES):
        mbarrier.init(barriers.index(slot), count=2)


@gluon.jit
def take_turn(turns, turn, WHO: gl.constexpr):
    """Wait until it is this consumer's turn of that number; the first one's first is at once."""
    mbarrier.wait(turns.index(WHO), (turn & 1) ^ (1 - WHO))


@gluon.jit
def pass_turn(turns, WHO: gl.constexpr):
    """The products of this turn are issued: the other consumer may issue its own behind them."""
    mbarrier.arrive(turns.index(1 - WHO), count=1)


@gluon.jit
def hide_early(v_here, v_ring, walk, t, first, last, STAGES: gl.constexpr, LAYOUT: gl.constexpr):
    """Hide the values of the t-th block that no row sees, as soon as they have come; waits for no
    other block."""
    BLOCK_N: gl.constexpr = v_ring.shape[1]
    key = nth_block(walk, t) * BLOCK_N
    if partly_seen(key, first, last, BLOCK_N):
        slot = await_tile(v_here, t, STAGES)
        hide(v_ring.index(slot), key, first, last, LAYOUT)


@gluon.jit
def copy_for_two(  # noqa: PLR0917
    tensors,
    tiles,
    here,
    free,
    place,
    walk,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The warp that copies: a tile of Q for each consumer, and K and V for both."""
    q, k, v = tensors
    q_tiles, k_ring, v_ring = tiles
    q_here, k_here, v_here = here
    k_free, v_free = free
    batch, head, head_kv, row = place
    total = blocks_of(walk, 0) + blocks_of(walk, 1)
    for who in gl.static_range(2):
        own = row + who * ROWS
        fetch(q, batch, head, own, q_here.index(who), q_tiles.index(who), total > 0)
    for t in range(total):
        key = nth_block(walk, t) * BLOCK_N
        slot = await_free(k_free, t, STAGES)
        fetch(k, batch, head_kv, key, k_here.index(slot), k_ring.index(slot), True)
        slot = await_free(v_free, t, STAGES)
        fetch(v, batch, head_kv, key, v_here.index(slot), v_ring.index(slot), True)
    # No product reads and no barrier is arrived at once this warp is at its end.
    for t in range(gl.maximum(total - STAGES, 0), total):
        await_tile(k_free, t, STAGES)
        await_tile(v_free, t, STAGES)


@gluon.jit
def consume(  # noqa: PLR0915
    shared,
    KIND: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    WHO: gl.constexpr,
):
    """One warpgroup: S, P and O of its rows, and what is stored of them."""
    tiles, here, free, turns, outputs, sizes, tables, place, scale_log2, walk, edges = shared
    q_tiles, k_ring, v_ring = tiles
    q_here, k_here, v_here = here
    k_free, v_free = free
    out, lse, out_batch, out_head, out_row, dim_v, heads_q = outputs
    batch, head, tile = place
    first, last = edges
    DTYPE: gl.constexpr = k_ring.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_D, 16]
    )
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    # 16 bytes per thread, whole rows per warp: of O on its way out, and of V where keys are hidden.
    ROW_LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0]
    )
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)

    own_tile = 2 * tile + WHO
    rows, low, high = own_rows(own_tile, tables, batch, sizes, KIND, ROWS, S_ROWS)
    total = blocks_of(walk, 0) + blocks_of(walk, 1)
    sign, size = signed_scale(scale_log2)
    m = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
    l = gl.zeros([ROWS], gl.float32, S_ROWS)  # noqa: E741 - the paper's name
    acc = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    if total > 0:
        q_tile = q_tiles.index(WHO)
        mbarrier.wait(q_here.index(WHO), 0)
        slot = await_tile(k_here, 0, STAGES)
        k_tile = k_ring.index(slot)
        take_turn(turns, 0, WHO)
        s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        pass_turn(turns, WHO)
        s = warpgroup_mma_wait(0, deps=(s,))
        meet()  # every warp of this consumer has read the tile
        mbarrier.arrive(k_free.index(slot), count=1)
        y = signed_scores(s, sign, walk, 0, low, high, BLOCK_N, S_LAYOUT)
        top, m, shift, _ = lifted_signed(y, m, m, size)
        p = gl.exp2(gl.fma(y, size, -shift[:, None]))
        l = gl.sum(p, 1)  # noqa: E741
        p_tile = gl.convert_layout(p.to(DTYPE), P_LAYOUT)

        for t in range(1, total):
            slot = await_tile(k_here, t, STAGES)
            k_tile = k_ring.index(slot)
            if WHO == 0:
                hide_early(v_here, v_ring, walk, t - 1, first, last, STAGES, ROW_LAYOUT)
            take_turn(turns, t, WHO)
            s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
            last_slot = await_tile(v_here, t - 1, STAGES)
            v_tile = v_ring.index(last_slot)
            acc = warpgroup_mma(p_tile, v_tile, acc, is_async=True)
            pass_turn(turns, WHO)
            s = warpgroup_mma_wait(1, deps=(s,))
            meet()
            mbarrier.arrive(k_free.index(slot), count=1)
            y = signed_scores(s, sign, walk, t, low, high, BLOCK_N, S_LAYOUT)
            top, m, shift, alpha = lifted_signed(y, top, m, size)
            p = gl.exp2(gl.fma(y, size, -shift[:, None]))
            l = l * alpha + gl.sum(p, 1)  # noqa: E741
            acc = warpgroup_mma_wait(0, deps=(acc,))
            meet()
            mbarrier.arrive(v_free.index(last_slot), count=1)
            acc = acc * gl.convert_layout(alpha, O_ROWS)[:, None]
            p_tile = gl.convert_layout(p.to(DTYPE), P_LAYOUT)

        if WHO == 0:
            hide_early(v_here, v_ring, walk, total - 1, first, last, STAGES, ROW_LAYOUT)
        last_slot = await_tile(v_here, total - 1, STAGES)
        v_tile = v_ring.index(last_slot)
        take_turn(turns, total, WHO)
        acc = warpgroup_mma(p_tile, v_tile, acc, is_async=True)
        pass_turn(turns, WHO)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        meet()
        mbarrier.arrive(v_free.index(last_slot), count=1)
        if WHO == 0:
            take_turn(turns, total + 1, WHO)  # the other consumer arrives no more

    place = batch, head, own_tile
    denominator = store_lse(lse, m, l, place, heads_q, rows, sizes[0])
    o_tile = acc / gl.convert_layout(denominator, O_ROWS)[:, None]
    strides = out_batch, out_head, out_row, dim_v
    store_out(out, o_tile, strides, place, sizes[0], ROWS, BLOCK_D, ROW_LAYOUT)


def turnstile_forward(  # noqa: PLR0917
    q,  # descriptors and arguments: those of `hopper_forward`
    k,
    v,
    out,
    lse,
    tables,
    out_batch: gl.int64,
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
    num_warps: gl.constexpr,  # of one consumer
):
    DTYPE: gl.constexpr = q.dtype
    ROWS: gl.constexpr = BLOCK_M // 2
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    ALL_ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])

    tile, head, head_kv, batch = own_place(seqlen_q, heads_q, group, BLOCK_M)
    sizes = seqlen_q, seqlen_kv, diagonal_low, diagonal_high
    _, low, high = own_rows(tile, tables, batch, sizes, KIND, BLOCK_M, ALL_ROWS)
    first, last, walk = key_walk(low, high, seqlen_kv, BLOCK_N)

    q_tiles = gl.allocate_shared_memory(DTYPE, [2, ROWS, BLOCK_D], TILE)
    k_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_D], TILE)
    v_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_D], TILE)
    q_here = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS)
    k_here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    v_here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS)
    open_ring(q_here, 2)
    open_ring(k_here, STAGES)
    open_ring(v_here, STAGES)
    open_shared_ring(k_free, STAGES)
    open_shared_ring(v_free, STAGES)
    open_ring(turns, 2)
    fence_async_shared()
    meet()

    tiles = q_tiles, k_ring, v_ring
    here = q_here, k_here, v_here
    free = k_free, v_free
    outputs = out, lse, out_batch, out_head, out_row, dim_v, heads_q
    where = batch.to(gl.int32), head, head_kv, tile * BLOCK_M
    place = batch, head, tile
    edges = first, last
    shared = tiles, here, free, turns, outputs, sizes, tables, place, scale_log2, walk, edges
    gl.warp_specialize(
        [
            (consume, (shared, KIND, ROWS, BLOCK_N, BLOCK_D, STAGES, 0)),
            (consume, (shared, KIND, ROWS, BLOCK_N, BLOCK_D, STAGES, 1)),
            (copy_for_two, ((q, k, v), tiles, here, free, where, walk, ROWS, BLOCK_N, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )

    close_ring(q_here, 2)
    close_ring(k_here, STAGES)
    close_ring(v_here, STAGES)
    close_ring(k_free, STAGES)
    close_ring(v_free, STAGES)
    close_ring(turns, 2)
