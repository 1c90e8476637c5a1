"""The query rows of one program: which they are, the keys they see, and how their results are
stored.  Device code in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.triton.tiles import own_tile, seen_keys


@gluon.jit
def own_place(seqlen_q, heads_q, group, BLOCK_M: gl.constexpr):
    """The tile, query head, key head and batch (int64) of this program.  The last tile comes first,
    since causal rows grow longer."""
    tiles = gl.cdiv(seqlen_q, BLOCK_M)
    tile, head, batch = own_tile(tiles, heads_q)
    tile = tiles - 1 - tile
    return tile, head, head // group, batch


@gluon.jit
def own_rows(
    tile, tables, batch, sizes, KIND: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr
):
    """The rows of a tile, and the keys [low, high) that each of them sees (`seen_keys`).

    Rows past the end see what the last row sees: they do not widen the tile's bounds.
    """
    rows = tile * BLOCK_M + gl.arange(0, BLOCK_M, LAYOUT)
    row = gl.minimum(rows, sizes[0] - 1)
    low, high = seen_keys(row, tables, batch, sizes, KIND)
    return rows, low, high


@gluon.jit
def store_lse(lse, m, l, place, heads_q, rows, seqlen_q):  # noqa: E741 - the paper's name
    """Store the natural-log LSE of a head's rows; returns what O is divided by.

    m, l: the maximum and the sum of each row, in base 2; place: batch, head and tile.
    An empty row has l = 0, acc = 0 and m = -inf, so that O = 0 and LSE = -inf.
    """
    batch, head, _ = place
    denominator = gl.where(l == 0.0, 1.0, l)
    lse_rows = 0.6931471805599453 * (m + gl.log2(denominator))
    gl.store(lse + (batch * heads_q + head) * seqlen_q + rows, lse_rows, mask=rows < seqlen_q)
    return denominator


@gluon.jit
def store_out(
    out,
    o_tile,
    strides,
    place,
    seqlen_q,
    BLOCK_M: gl.constexpr,
    BLOCK_D: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Store a tile of O in out's dtype, through LAYOUT: 16 bytes per thread, whole rows per warp.

    strides: of batch, head and row, and head_dim_v, in units of 8 elements; place: batch, head and
    tile.
    """
    batch, head, tile = place
    o_tile = gl.convert_layout(o_tile.to(out.dtype.element_ty), LAYOUT)
    o_row = tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, LAYOUT))
    where = batch * (strides[0] * 8) + head * (strides[1] * 8)
    places = out + where + o_row.to(gl.int64)[:, None] * (strides[2] * 8) + dims[None, :]
    inside = (o_row < seqlen_q)[:, None] & (dims < strides[3] * 8)[None, :]
    gl.store(places, o_tile, mask=inside)
