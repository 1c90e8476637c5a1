"""Two CTAs of a cluster that share every tile of K and V: device code in Gluon beside that of
`ring`, whose programs share nothing.  Needs Triton 3.7.

A tensor of the program belongs to the whole cluster.  Its layout says by `cga_layout` what the
second CTA holds: the lower half of the rows (SPLIT_ROWS), or the same elements (SHARED_TILE,
SHARED_ROWS).  A barrier of mbarriers (`EACH_ITS_OWN`) is one in each CTA, at the same address.

A tile of K or V is fetched once: the first CTA's copy engine writes it into both CTAs, and its
bytes count at the barrier of the CTA that they reach.  Each CTA expects all of them at its own
barrier.  A slot is free when the warps of *both* CTAs have read it.  The barrier of the cluster
says so, in two halves: `let_go` arrives as soon as the warp has read, and `await_partner` waits
only when the slot is needed.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

CTAS = 2
cluster = getattr(hopper, "cluster", None)  # as of Triton 3.7

SPLIT_ROWS = gl.constexpr([[1, 0]])
SHARED_TILE = gl.constexpr([[0, 0]])
SHARED_ROWS = gl.constexpr([[0]])
EACH_ITS_OWN = gl.constexpr([[1]])


def unavailable() -> str | None:
    """Why this Triton cannot build a kernel of clusters, or None."""
    if cluster is None or not hasattr(mbarrier, "fence_init_release_cluster"):
        return f"Triton {triton.__version__} has no barrier of a cluster: it needs 3.7"
    return None


@gluon.jit
def announce_barriers():
    """Behind the initialisation of the mbarriers: begin to tell the partner of them."""
    mbarrier.fence_init_release_cluster()
    cluster.arrive(relaxed=True)


@gluon.jit
def let_go():
    """This warp has read its tiles: the copy engine of the first CTA may overwrite them, and the
    zeros that `hide` stored there, once the partner has let go, too."""
    fence_async_shared(cluster=True)
    cluster.arrive()


@gluon.jit
def await_partner():
    """Wait until all warps of both CTAs have arrived."""
    cluster.wait()


@gluon.jit
def fetch_own(tensor, batch, head, row, barrier, tile, pred):
    """Begin to copy rows [row, row + tile's) of a head, each CTA the half that is its own, if pred.
    See `kernels.gluon.ring.fetch`."""
    batch = gl.minimum(batch, tensor.shape[0] - 1)
    head = gl.minimum(head, tensor.shape[1] - 1)
    mbarrier.expect(barrier, tensor.nbytes_per_cta, pred=pred)
    whole = tile._reinterpret(tensor.dtype, tensor.block_shape, tensor.layout)
    tma.async_copy_global_to_shared(tensor, [batch, head, row, 0], barrier, whole, pred=pred)


@gluon.jit
def fetch_shared(tensor, batch, head, row, barrier, tile, pred):
    """Begin to copy rows [row, row + tile's) of a head into both CTAs at once, if pred."""
    batch = gl.minimum(batch, tensor.shape[0] - 1)
    head = gl.minimum(head, tensor.shape[1] - 1)
    mbarrier.expect(barrier, tensor.nbytes_per_cta, pred=pred)
    whole = tile._reinterpret(tensor.dtype, tensor.block_shape, tensor.layout)
    tma.async_copy_global_to_shared(
        tensor, [batch, head, row, 0], barrier, whole, pred=pred, multicast=True
    )
