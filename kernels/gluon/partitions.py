"""The partitions of the Blackwell forward: device code in Gluon.  Needs Triton 3.7.

Three kinds of warps walk over the same blocks of keys and tell each other at mbarriers how far they
are.  Each barrier has one arrival in a phase:

| barrier | arrival | waits |
|---|---|---|
| q_here, k_here, v_here | the bytes of a tile have come | multiply; v_here: soften, too |
| k_free, v_free | a product has read the tile | copy_tiles |
| s_here | S is in tensor memory | soften |
| s_free | S is in registers | multiply |
| p_here | P and the rescaled O are in tensor memory, and V's unseen values are hidden | multiply |
| o_here | O holds one block more | soften |

A `free` barrier is waited for before its first arrival: the phase before the first has ended.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.gluon.ring import await_tile, fetch, hide, nth_block
from kernels.gluon.rows import own_rows, store_lse, store_out
from kernels.gluon.softmax import lifted, scores
from kernels.triton.tiles import blocks_of

# As of Triton 3.7; earlier ones have others or none.
TensorMemoryLayout = getattr(blackwell, "TensorMemoryLayout", None)
allocate_tensor_memory = getattr(blackwell, "allocate_tensor_memory", None)
get_tmem_reg_layout = getattr(blackwell, "get_tmem_reg_layout", None)
tcgen05_mma = getattr(blackwell, "tcgen05_mma", None)


def unavailable() -> str | None:
    """Why this Triton cannot build a kernel with tensor memory, or None."""
    if None in (TensorMemoryLayout, allocate_tensor_memory, get_tmem_reg_layout, tcgen05_mma):
        return f"Triton {triton.__version__} has no tensor memory as it is in 3.7"
    return None


@gluon.jit
def await_free(barriers, tile, STAGES: gl.constexpr):
    """Wait until the slot of the tile of that number is free, which it is in the first round;
    returns it."""
    slot = tile % STAGES
    mbarrier.wait(barriers.index(slot), ((tile // STAGES) & 1) ^ 1)
    return slot


@gluon.jit
def copy_tiles(
    tensors, tiles, here, free, place, walk, BLOCK_N: gl.constexpr, STAGES: gl.constexpr
):
    """The warp that copies: each tile as soon as its slot is free."""
    q, k, v = tensors
    q_tile, k_ring, v_ring = tiles
    q_here, k_here, v_here = here
    k_free, v_free = free
    batch, head, head_kv, row = place
    total = blocks_of(walk, 0) + blocks_of(walk, 1)
    fetch(q, batch, head, row, q_here.index(0), q_tile, total > 0)
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
def multiply(tiles, here, free, memory, turns, walk, STAGES: gl.constexpr, SIDES: gl.constexpr):
    """The warp that issues products: S of the next block, and then O of this one."""
    q_tile, k_ring, v_ring = tiles
    q_here, k_here, v_here = here
    k_free, v_free = free
    s_memory, p_memory, o_memory = memory
    s_here, s_free, p_here, o_here = turns
    total = blocks_of(walk, 0) + blocks_of(walk, 1)
    if total > 0:
        mbarrier.wait(q_here.index(0), 0)
    for n in range(total + 1):
        if n < total:
            slot = await_tile(k_here, n, STAGES)
            side = await_free(s_free, n, SIDES)
            tcgen05_mma(
                q_tile,
                k_ring.index(slot).permute((1, 0)),
                s_memory.index(side),
                use_acc=False,
                mbarriers=[s_here.index(side), k_free.index(slot)],
            )
        if n > 0:
            t = n - 1
            await_tile(p_here, t, 1)
            slot = await_tile(v_here, t, STAGES)
            tcgen05_mma(
                p_memory,
                v_ring.index(slot),
                o_memory,
                use_acc=t > 0,
                mbarriers=[o_here.index(0), v_free.index(slot)],
            )


@gluon.jit
def soften(  # noqa: PLR0917
    v_ring,
    v_here,
    memory,
    turns,
    outputs,
    sizes,
    tables,
    place,
    scale_log2,
    walk,
    edges,
    KIND: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    SIDES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """The warps that make P of S, rescale O and store both results."""
    s_memory, p_memory, o_memory = memory
    s_here, s_free, p_here, o_here = turns
    out, lse, out_batch, out_head, out_row, dim_v, heads_q = outputs
    batch, _, tile = place
    first, last = edges
    seqlen_q = sizes[0]
    DTYPE: gl.constexpr = p_memory.dtype
    S_LAYOUT: gl.constexpr = get_tmem_reg_layout(
        gl.float32, [BLOCK_M, BLOCK_N], s_memory.layout, num_warps
    )
    P_LAYOUT: gl.constexpr = get_tmem_reg_layout(
        DTYPE, [BLOCK_M, BLOCK_N], p_memory.layout, num_warps
    )
    O_LAYOUT: gl.constexpr = get_tmem_reg_layout(
        gl.float32, [BLOCK_M, BLOCK_D], o_memory.layout, num_warps
    )
    # 16 bytes per thread, whole rows per warp: of O on its way out, and of V where keys are hidden.
    ROW_LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_D, BLOCK_D // 8], [num_warps, 1], [1, 0]
    )
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)

    rows, low, high = own_rows(tile, tables, batch, sizes, KIND, BLOCK_M, S_ROWS)
    m = gl.full([BLOCK_M], float("-inf"), gl.float32, S_ROWS)
    l = gl.zeros([BLOCK_M], gl.float32, S_ROWS)  # noqa: E741 - the paper's name
    total = blocks_of(walk, 0) + blocks_of(walk, 1)
    for t in range(total):
        side = await_tile(s_here, t, SIDES)
        s = s_memory.index(side).load(S_LAYOUT)
        mbarrier.arrive(s_free.index(side), count=1)
        x = scores(s, scale_log2, walk, t, low, high, BLOCK_N, S_LAYOUT)
        m, shift, alpha = lifted(x, m)
        p = gl.exp2(x - shift[:, None])
        l = l * alpha + gl.sum(p, 1)  # noqa: E741
        if t > 0:
            await_tile(o_here, t - 1, 1)
            acc = o_memory.load(O_LAYOUT) * gl.convert_layout(alpha, O_ROWS)[:, None]
            o_memory.store(acc)
        p_memory.store(gl.convert_layout(p.to(DTYPE), P_LAYOUT))
        slot = await_tile(v_here, t, STAGES)
        hide(v_ring.index(slot), nth_block(walk, t) * BLOCK_N, first, last, ROW_LAYOUT)
        mbarrier.arrive(p_here.index(0), count=1)

    # An empty row has l = 0 and m = -inf, so O = 0 and LSE = -inf; without a block O is not there.
    acc = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, O_LAYOUT)
    if total > 0:
        await_tile(o_here, total - 1, 1)
        acc = o_memory.load(O_LAYOUT)
    denominator = store_lse(lse, m, l, place, heads_q, rows, seqlen_q)
    o_tile = acc / gl.convert_layout(denominator, O_ROWS)[:, None]
    strides = out_batch, out_head, out_row, dim_v
    store_out(out, o_tile, strides, place, seqlen_q, BLOCK_M, BLOCK_D, ROW_LAYOUT)
