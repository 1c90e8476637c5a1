"""The kernels of `flash_backward`, which says what they compute; their arguments are as
`kernels.triton.tiles` has them.

Tensors are (batch, heads, seqlen, head_dim) with any strides but the innermost, which is 1; lse and
delta float32 (batch, heads_q, seqlen_q), contiguous.  steps: the strides of the tensors, in their
order.
"""

import triton
import triton.language as tl

from kernels.triton.common import twice
from kernels.triton.tiles import (
    block_at,
    blocks_of,
    head_of,
    inside,
    key_walk,
    own_tile,
    plain,
    plain_dims,
    plain_sizes,
    rows_of,
    seen_keys,
)


@triton.jit
def _shift(lse):
    """What is subtracted from x.  A row of which every score is -inf has LSE = -inf, and P =
    2^(-inf - 0) = 0."""
    return tl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634)


def _row_sums(  # noqa: PLR0917
    out,
    dout,
    delta,
    steps,
    head_dims,
    sizes,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    heads_q, _, seqlen_q, _ = plain_sizes(sizes)
    _, head_dim_v = plain_dims(head_dims, ALIGNED)
    tile, head, batch = own_tile(seqlen_q, heads_q, ROWS)
    head_64 = head.to(tl.int64)
    rows = tile * ROWS + tl.arange(0, ROWS)
    dims_v = tl.arange(0, BLOCK_DV)[None, :]
    mask = (rows < seqlen_q)[:, None] & (dims_v < head_dim_v)
    o_rows = rows_of(head_of(out, steps[0], batch, head_64, ALIGNED), steps[0], rows, ALIGNED)
    do_rows = rows_of(head_of(dout, steps[1], batch, head_64, ALIGNED), steps[1], rows, ALIGNED)
    o_tile = tl.load(o_rows + dims_v, mask=mask, other=0.0)
    do_tile = tl.load(do_rows + dims_v, mask=mask, other=0.0)
    sums = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    tl.store(delta + (batch * heads_q + head) * seqlen_q + rows, sums, mask=rows < seqlen_q)


def _key_value_gradients(  # noqa: PLR0915, PLR0917
    q,
    k,
    v,
    dout,
    dk,
    dv,
    lse,
    delta,
    tables,
    steps,
    head_dims,
    sizes,
    scale_log2: tl.float32,
    scale: tl.float32,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    heads_kv, group, seqlen_q, seqlen_kv = plain_sizes(sizes)
    head_dim, head_dim_v = plain_dims(head_dims, ALIGNED)
    # The first keys first, since most causal rows see them.
    tile, head_kv, batch = own_tile(seqlen_kv, heads_kv, BLOCK_N)
    key_begin = tile * BLOCK_N
    key_end = tl.minimum(key_begin + BLOCK_N, seqlen_kv)
    head_kv_64 = head_kv.to(tl.int64)

    # Rows [first, last) hold those that see a key of this block; of these, [inner_first,
    # inner_last) see all of it.
    if KIND == "interval":
        SCANNED: tl.constexpr = 1024
        firsts = tl.zeros([SCANNED], tl.int32) + seqlen_q
        lasts = tl.zeros([SCANNED], tl.int32)
        for start in range(0, seqlen_q, SCANNED):
            scanned = start + tl.arange(0, SCANNED)
            row = tl.minimum(scanned, seqlen_q - 1)
            low, high = seen_keys(row, tables, batch, seqlen_q, seqlen_kv, sizes, KIND)
            high = tl.where(scanned < seqlen_q, high, 0)
            sees = tl.maximum(low, key_begin) < tl.minimum(high, key_end)
            firsts = tl.where(sees, tl.minimum(firsts, scanned), firsts)
            lasts = tl.where(sees, scanned + 1, lasts)
        first = tl.min(firsts, 0)
        last = tl.max(lasts, 0)
        inner_first = first
        inner_last = first
    else:
        first = key_begin * 0
        last = seqlen_q
        inner_first = first
        inner_last = last
        if KIND != "full":
            diagonal_high = plain(sizes[5], False)
            first = tl.maximum(key_begin - diagonal_high, 0)
            inner_first = tl.maximum(key_end - 1 - diagonal_high, 0)
        if KIND == "window":
            diagonal_low = plain(sizes[4], False)
            last = tl.minimum(key_end - diagonal_low, seqlen_q)
            inner_last = tl.minimum(key_begin + 1 - diagonal_low, seqlen_q)
    inner_begin = tl.cdiv(inner_first, BLOCK_M)
    walk = inside(first // BLOCK_M, inner_begin, inner_last // BLOCK_M, tl.cdiv(last, BLOCK_M))

    # Keys past the end are 0 here.  What they become is not stored, and each key's sums are its
    # own.
    key = key_begin + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)[None, :]
    dims_v = tl.arange(0, BLOCK_DV)[None, :]
    k_mask = (key < seqlen_kv)[:, None] & (dims < head_dim)
    v_mask = (key < seqlen_kv)[:, None] & (dims_v < head_dim_v)
    k_rows = rows_of(head_of(k, steps[1], batch, head_kv_64, ALIGNED), steps[1], key, ALIGNED)
    v_rows = rows_of(head_of(v, steps[2], batch, head_kv_64, ALIGNED), steps[2], key, ALIGNED)
    k_tile = tl.load(k_rows + dims, mask=k_mask, other=0.0)
    v_tile = tl.load(v_rows + dims_v, mask=v_mask, other=0.0)

    dk_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in range(group):
        head_64 = head_kv_64 * group + member
        q_head = head_of(q, steps[0], batch, head_64, ALIGNED)
        do_head = head_of(dout, steps[3], batch, head_64, ALIGNED)
        sums = (batch * heads_kv * group + head_64) * seqlen_q
        for EDGE in tl.static_range(KIND == "interval", 2):
            for i in range(blocks_of(walk, EDGE)):
                block = block_at(walk, i, EDGE)
                rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
                row = tl.minimum(rows, seqlen_q - 1)
                q_mask = dims < head_dim
                do_mask = dims_v < head_dim_v
                if EDGE == 1:
                    low, high = seen_keys(row, tables, batch, seqlen_q, seqlen_kv, sizes, KIND)
                    high = tl.where(rows < seqlen_q, high, 0)
                    sees = tl.maximum(low, key_begin) < tl.minimum(high, key_end)
                    q_mask = q_mask & sees[:, None]
                    do_mask = do_mask & sees[:, None]
                    visible = (key[:, None] >= low[None, :]) & (key[:, None] < high[None, :])

                q_rows = rows_of(q_head, steps[0], row, ALIGNED)
                do_rows = rows_of(do_head, steps[3], row, ALIGNED)
                q_tile = tl.load(q_rows + dims, mask=q_mask, other=0.0)
                do_tile = tl.load(do_rows + dims_v, mask=do_mask, other=0.0)
                shift = _shift(tl.load(lse + sums + row))
                delta_row = tl.load(delta + sums + row)
                x = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee") * scale_log2
                p = tl.exp2(x - shift[None, :])
                if EDGE == 1:
                    p = tl.where(visible, p, 0.0)
                dv_tile = tl.dot(p.to(do_tile.dtype), do_tile, dv_tile, input_precision="ieee")
                ds = p * (
                    tl.dot(v_tile, tl.trans(do_tile), input_precision="ieee") - delta_row[None, :]
                )
                if EDGE == 1:
                    ds = tl.where(visible, ds, 0.0)
                dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile, input_precision="ieee")

    dk_rows = rows_of(head_of(dk, steps[4], batch, head_kv_64, ALIGNED), steps[4], key, ALIGNED)
    dv_rows = rows_of(head_of(dv, steps[5], batch, head_kv_64, ALIGNED), steps[5], key, ALIGNED)
    written = (key < key_end)[:, None]
    tl.store(
        dk_rows + dims, (dk_tile * scale).to(dk.dtype.element_ty), mask=written & (dims < head_dim)
    )
    tl.store(
        dv_rows + dims_v, dv_tile.to(dv.dtype.element_ty), mask=written & (dims_v < head_dim_v)
    )


def _query_gradients(  # noqa: PLR0917
    q,
    k,
    v,
    dout,
    dq,
    lse,
    delta,
    tables,
    steps,
    head_dims,
    sizes,
    scale_log2: tl.float32,
    scale: tl.float32,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    heads_q, group, seqlen_q, seqlen_kv = plain_sizes(sizes)
    head_dim, head_dim_v = plain_dims(head_dims, ALIGNED)
    tile, head, batch = own_tile(seqlen_q, heads_q, BLOCK_M)
    tile = tl.cdiv(seqlen_q, BLOCK_M) - 1 - tile
    head_64 = head.to(tl.int64)
    head_kv_64 = (head // group).to(tl.int64)

    # Which blocks of keys are walked, and which need a mask: as in the forward.
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.minimum(rows, seqlen_q - 1)
    low, high = seen_keys(row, tables, batch, seqlen_q, seqlen_kv, sizes, KIND)
    first, last, walk = key_walk(low, high, seqlen_kv, BLOCK_N)

    dims = tl.arange(0, BLOCK_D)[None, :]
    dims_v = tl.arange(0, BLOCK_DV)[None, :]
    q_rows = rows_of(head_of(q, steps[0], batch, head_64, ALIGNED), steps[0], row, ALIGNED)
    do_rows = rows_of(head_of(dout, steps[3], batch, head_64, ALIGNED), steps[3], row, ALIGNED)
    q_tile = tl.load(q_rows + dims, mask=dims < head_dim, other=0.0)
    do_tile = tl.load(do_rows + dims_v, mask=dims_v < head_dim_v, other=0.0)
    sums = (batch * heads_q + head) * seqlen_q
    shift = _shift(tl.load(lse + sums + row))[:, None]
    delta_row = tl.load(delta + sums + row)[:, None]
    k_head = head_of(k, steps[1], batch, head_kv_64, ALIGNED)
    v_head = head_of(v, steps[2], batch, head_kv_64, ALIGNED)

    dq_tile = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for EDGE in tl.static_range(2):
        for i in range(blocks_of(walk, EDGE)):
            block = block_at(walk, i, EDGE)
            key = block * BLOCK_N + tl.arange(0, BLOCK_N)
            k_mask = dims < head_dim
            v_mask = dims_v < head_dim_v
            if EDGE == 1:
                loaded = ((key >= first) & (key < last))[:, None]
                k_mask = k_mask & loaded
                v_mask = v_mask & loaded
                visible = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])

            k_tile = tl.load(rows_of(k_head, steps[1], key, ALIGNED) + dims, mask=k_mask, other=0.0)
            v_tile = tl.load(
                rows_of(v_head, steps[2], key, ALIGNED) + dims_v, mask=v_mask, other=0.0
            )
            x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
            p = tl.exp2(x - shift)
            ds = p * (tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee") - delta_row)
            if EDGE == 1:
                ds = tl.where(visible, ds, 0.0)
            dq_tile = tl.dot(ds.to(k_tile.dtype), k_tile, dq_tile, input_precision="ieee")

    dq_rows = rows_of(head_of(dq, steps[4], batch, head_64, ALIGNED), steps[4], row, ALIGNED)
    dq_mask = (rows < seqlen_q)[:, None] & (dims < head_dim)
    tl.store(dq_rows + dims, (dq_tile * scale).to(dq.dtype.element_ty), mask=dq_mask)


row_sums_aligned, row_sums = twice(_row_sums)
key_value_gradients_aligned, key_value_gradients = twice(_key_value_gradients)
query_gradients_aligned, query_gradients = twice(_query_gradients)
