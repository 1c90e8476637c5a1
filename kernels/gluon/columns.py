"""Tiles of V stored transposed, whose columns are keys: device code in Gluon beside that of `ring`,
whose rows are keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kernels.gluon.ring import fetch_box, meet, partly_seen


@gluon.jit
def fetch_columns(tensor, batch, head, column, barrier, tile, pred):
    """`kernels.gluon.ring.fetch_box` of columns [column, column + tile's) and all rows."""
    fetch_box(tensor, batch, head, (0, column), barrier, tile, pred)


@gluon.jit
def hide_columns(v_tile, key_first, first, last, LAYOUT: gl.constexpr):
    """Overwrite the columns of keys that no row of the program sees with zeros, so that NaN there
    cannot enter P V as 0 * NaN."""
    keys: gl.constexpr = v_tile.shape[1]
    if partly_seen(key_first, first, last, keys):
        key = key_first + gl.arange(0, keys, gl.SliceLayout(0, LAYOUT))
        seen = (key >= first) & (key < last)
        values = v_tile.load(LAYOUT)
        v_tile.store(gl.where(seen[None, :], values, gl.zeros_like(values)))
        fence_async_shared()  # wgmma and the copy engine come after these stores
        meet()
