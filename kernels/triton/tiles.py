"""What the Triton kernels share on the device: how they take their arguments, the tile of a
program, the keys that its rows see, and the walk over their blocks.

Every mask shows a row one interval of keys, [low, high): found by comparison with a diagonal (KIND
"causal", "window"), or read from a table (KIND "interval").  A walk (begin, inner_begin, inner_end,
end) numbers blocks: those of [begin, end) hold a key that some row sees, and those of [inner_begin,
inner_end) are seen whole by every row and need no mask.  The latter come first (EDGE 0), then those
at the edges (EDGE 1); all others are never loaded.

Triton builds a kernel again for an integer that 16 divides, and for 1.  It can be told not to, but
not of the integers in a tuple: strides and head dims come as 16 n, which one build serves, and
`plain` divides them.  Those of aligned tensors are multiples of 16 and come as they are, so that
Triton knows it (ALIGNED).
"""

import triton
import triton.language as tl


@triton.jit
def plain(number, ALIGNED: tl.constexpr):
    """An integer of a tuple of arguments."""
    if ALIGNED:
        return number
    return number >> 4


@triton.jit
def plain_dims(head_dims, ALIGNED: tl.constexpr):
    """head_dim and head_dim_v."""
    return plain(head_dims[0], ALIGNED), plain(head_dims[1], ALIGNED)


@triton.jit
def own_tile(tiles, heads):
    """The tile (of so many per head), head, and batch (int64) of this program; one grid axis, so
    that batch x heads may exceed 65535."""
    program = tl.program_id(0)
    return program % tiles, (program // tiles) % heads, ((program // tiles) // heads).to(tl.int64)


@triton.jit
def head_of(tensor, steps, batch, head, ALIGNED: tl.constexpr):
    """Where a head begins; batch and head are int64, steps the strides of batch, head and
    sequence."""
    return tensor + batch * plain(steps[0], ALIGNED) + head * plain(steps[1], ALIGNED)


@triton.jit
def rows_of(head, steps, rows, ALIGNED: tl.constexpr):
    """Where these rows of a head begin, (rows, 1)."""
    return head + rows.to(tl.int64)[:, None] * plain(steps[2], ALIGNED)


@triton.jit
def seen_keys(row, tables, batch, sizes, KIND: tl.constexpr):
    """The keys [low, high) that each row sees.

    tables: row_low and row_high, int32 (batch, seqlen_q), contiguous; None but for KIND "interval".
    sizes: seqlen_q, seqlen_kv and the diagonals.  Row r sees keys from r + diagonal_low (KIND
    "window") to r + diagonal_high, inclusive (KIND "causal" and "window").
    """
    seqlen_q, seqlen_kv, diagonal_low, diagonal_high = sizes
    if KIND == "interval":
        low = tl.load(tables[0] + batch * seqlen_q + row)
        high = tl.load(tables[1] + batch * seqlen_q + row)
    else:
        low = row * 0
        high = low + seqlen_kv
        if KIND != "full":
            high = tl.minimum(row + (diagonal_high + 1), seqlen_kv)
        if KIND == "window":
            low = tl.maximum(row + diagonal_low, 0)
    return low, high


@triton.jit
def inside(begin, inner_begin, inner_end, end):
    """A walk of ordered, and so of no negative number of, blocks."""
    end = tl.maximum(end, begin)
    inner_begin = tl.minimum(tl.maximum(inner_begin, begin), end)
    inner_end = tl.minimum(tl.maximum(inner_end, inner_begin), end)
    return begin, inner_begin, inner_end, end


@triton.jit
def key_walk(low, high, seqlen_kv, BLOCK_N: tl.constexpr):
    """The keys [first, last) outside which no row of a tile sees one, and the walk over their
    blocks.

    An empty row has max(low) >= low >= high >= min(high), which leaves no inner block.
    """
    some = low < high
    first = tl.min(tl.where(some, low, seqlen_kv), 0)
    last = tl.max(tl.where(some, high, 0), 0)
    begin = first // BLOCK_N
    end = tl.cdiv(last, BLOCK_N)
    inner_begin = tl.cdiv(tl.max(low, 0), BLOCK_N)
    inner_end = tl.min(high, 0) // BLOCK_N
    return first, last, inside(begin, inner_begin, inner_end, end)


@triton.jit
def blocks_of(walk, EDGE: tl.constexpr):
    """How many blocks the walk has at the edges, or inside."""
    if EDGE:
        return (walk[1] - walk[0]) + (walk[3] - walk[2])
    return walk[2] - walk[1]


@triton.jit
def block_at(walk, i, EDGE: tl.constexpr):
    """The number of the i-th of these blocks."""
    if EDGE:
        edges_left = walk[1] - walk[0]
        return tl.where(i < edges_left, walk[0] + i, walk[2] + (i - edges_left))
    return walk[1] + i
