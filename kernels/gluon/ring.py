"""The ring of K and V tiles in shared memory, and its barriers: device code in Gluon.

STAGES slots hold one tile each. Every slot has a barrier that the copy engine completes once per
round: `init` sets it up for one arrival, `expect` makes that arrival and names the bytes that are
to come, and the phase ends when both are there. The t-th tile lies in slot t % STAGES, and its
arrival ends phase t // STAGES of that slot's barrier. A wait names a phase by its lowest bit,
which is enough since at most one phase is open: a slot is filled again only after its tile was
waited for and read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kernels.triton.tiles import block_at, blocks_of

# All threads of a program wait for each other: `barrier` as of Triton 3.7.
meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def open_ring(barriers, STAGES: gl.constexpr):
    """Make a ring's barriers ready for one arrival per round; no copy arrives before `meet`."""
    for slot in gl.static_range(STAGES):
        mbarrier.init(barriers.index(slot), count=1)


@gluon.jit
def close_ring(barriers, STAGES: gl.constexpr):
    """Give up the barriers of a ring; every phase that was begun has ended."""
    for slot in gl.static_range(STAGES):
        mbarrier.invalidate(barriers.index(slot))


@gluon.jit
def fetch_box(tensor, batch, head, place, barrier, tile, pred):
    """Begin to copy a box of a head into a tile, if pred; what is out of the tensor's bounds comes
    as zeros.

    place: where the box begins in the dimensions behind batch and head.  A dimension along which
    the tensor is expanded has size 1 in the descriptor.
    """
    batch = gl.minimum(batch, tensor.shape[0] - 1)
    head = gl.minimum(head, tensor.shape[1] - 1)
    mbarrier.expect(barrier, tensor.block_type.nbytes, pred=pred)
    where = (batch, head) + place  # noqa: RUF005 - Triton unpacks no tuple here
    tma.async_copy_global_to_shared(
        tensor, where, barrier, tile.reshape(tensor.block_shape), pred=pred
    )


@gluon.jit
def fetch(tensor, batch, head, row, barrier, tile, pred):
    """`fetch_box` of rows [row, row + tile's) and all columns."""
    fetch_box(tensor, batch, head, (row, 0), barrier, tile, pred)


@gluon.jit
def await_tile(barriers, tile, STAGES: gl.constexpr):
    """Wait until the tile of that number has come; returns its slot."""
    slot = tile % STAGES
    mbarrier.wait(barriers.index(slot), (tile // STAGES) & 1)
    return slot


@gluon.jit
def nth_block(walk, t):
    """The number of the t-th block of a walk: those inside come first, then those at the edges."""
    inner = blocks_of(walk, 0)
    return gl.where(t < inner, block_at(walk, t, 0), block_at(walk, t - inner, 1))


@gluon.jit
def partly_seen(key_first, first, last, KEYS: gl.constexpr):
    """Whether a block has keys outside of those that some row of the program sees."""
    return (key_first < first) | (key_first + KEYS > last)


@gluon.jit
def hide(v_tile, key_first, first, last, LAYOUT: gl.constexpr):
    """Overwrite the values of a tile that no row of the program sees with zeros: whatever lies
    there, NaN included, cannot enter P V as 0 * NaN."""
    keys: gl.constexpr = v_tile.shape[0]
    if partly_seen(key_first, first, last, keys):
        key = key_first + gl.arange(0, keys, gl.SliceLayout(1, LAYOUT))
        seen = (key >= first) & (key < last)
        values = v_tile.load(LAYOUT)
        v_tile.store(gl.where(seen[:, None], values, gl.zeros_like(values)))
        fence_async_shared()  # wgmma and the copy engine come after these stores
        meet()
