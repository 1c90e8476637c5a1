"""The kernels of `flash_backward`, which says what they compute.

Tensors are (batch, heads, seqlen, head_dim) with any strides but the innermost, which is 1; lse and
delta float32 (batch, heads_q, seqlen_q) and the tables row_low and row_high int32 (batch,
seqlen_q), contiguous.  The tables are None but for KIND "interval"; for "causal" and "window" row r
sees the keys from r + diagonal_low (window) to r + diagonal_high, inclusive. group: query heads per
key head.  One grid axis each, so that batch x heads may exceed 65535.
"""

import triton
import triton.language as tl

from kernels.triton.common import twice


@triton.jit
def _seen_keys(
    row, tables_low, tables_high, seqlen_kv, diagonal_low, diagonal_high, KIND: tl.constexpr
):
    """The keys [low, high) that each row sees; the tables are those of the row's batch."""
    if KIND == "interval":
        low = tl.load(tables_low + row)
        high = tl.load(tables_high + row)
    else:
        low = row * 0
        high = low + seqlen_kv
        if KIND != "full":
            high = tl.minimum(row + (diagonal_high + 1), seqlen_kv)
        if KIND == "window":
            low = tl.maximum(row + diagonal_low, 0)
    return low, high


@triton.jit
def _shift(lse):
    """What is subtracted from x.  A row of which every score is -inf has LSE = -inf, and P =
    2^(-inf - 0) = 0."""
    return tl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634)


def _row_sums(  # noqa: PLR0917
    out,
    dout,
    delta,
    stride_ob: tl.int64,
    stride_oh: tl.int64,
    stride_os: tl.int64,
    stride_gb: tl.int64,
    stride_gh: tl.int64,
    stride_gs: tl.int64,
    heads_q: tl.int32,
    seqlen_q: tl.int32,
    head_dim_v: tl.int32,
    ROWS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    tiles = tl.cdiv(seqlen_q, ROWS)
    program = tl.program_id(0)
    rows = program % tiles * ROWS + tl.arange(0, ROWS)
    head_64 = ((program // tiles) % heads_q).to(tl.int64)
    batch_64 = ((program // tiles) // heads_q).to(tl.int64)
    dims_v = tl.arange(0, BLOCK_DV)[None, :]
    rows_64 = rows.to(tl.int64)[:, None]
    mask = (rows < seqlen_q)[:, None] & (dims_v < head_dim_v)
    o_tile = tl.load(
        out + batch_64 * stride_ob + head_64 * stride_oh + rows_64 * stride_os + dims_v,
        mask=mask,
        other=0.0,
    )
    do_tile = tl.load(
        dout + batch_64 * stride_gb + head_64 * stride_gh + rows_64 * stride_gs + dims_v,
        mask=mask,
        other=0.0,
    )
    sums = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    tl.store(delta + (batch_64 * heads_q + head_64) * seqlen_q + rows, sums, mask=rows < seqlen_q)


def _key_value_gradients(  # noqa: PLR0912, PLR0915, PLR0917
    q,
    k,
    v,
    dout,
    dk,
    dv,
    lse,
    delta,
    row_low,
    row_high,
    stride_qb: tl.int64,
    stride_qh: tl.int64,
    stride_qs: tl.int64,
    stride_kb: tl.int64,
    stride_kh: tl.int64,
    stride_ks: tl.int64,
    stride_vb: tl.int64,
    stride_vh: tl.int64,
    stride_vs: tl.int64,
    stride_gb: tl.int64,
    stride_gh: tl.int64,
    stride_gs: tl.int64,
    stride_dkb: tl.int64,
    stride_dkh: tl.int64,
    stride_dks: tl.int64,
    stride_dvb: tl.int64,
    stride_dvh: tl.int64,
    stride_dvs: tl.int64,
    heads_kv: tl.int32,
    group: tl.int32,
    seqlen_q: tl.int32,
    seqlen_kv: tl.int32,
    head_dim: tl.int32,
    head_dim_v: tl.int32,
    diagonal_low: tl.int32,
    diagonal_high: tl.int32,
    scale_log2: tl.float32,
    scale: tl.float32,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    # The first keys first, since most causal rows see them.
    tiles = tl.cdiv(seqlen_kv, BLOCK_N)
    program = tl.program_id(0)
    key_begin = program % tiles * BLOCK_N
    key_end = tl.minimum(key_begin + BLOCK_N, seqlen_kv)
    head_kv = (program // tiles) % heads_kv
    head_kv_64 = head_kv.to(tl.int64)
    batch_64 = ((program // tiles) // heads_kv).to(tl.int64)
    tables_low = row_low
    tables_high = row_high
    if KIND == "interval":
        tables_low += batch_64 * seqlen_q
        tables_high += batch_64 * seqlen_q

    # Rows [first, last) hold those that see a key of this block; of these, [inner_first,
    # inner_last) see all of it.
    if KIND == "interval":
        SCANNED: tl.constexpr = 1024
        firsts = tl.zeros([SCANNED], tl.int32) + seqlen_q
        lasts = tl.zeros([SCANNED], tl.int32)
        for start in range(0, seqlen_q, SCANNED):
            scanned = start + tl.arange(0, SCANNED)
            low = tl.load(tables_low + scanned, mask=scanned < seqlen_q, other=0)
            high = tl.load(tables_high + scanned, mask=scanned < seqlen_q, other=0)
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
            first = tl.maximum(key_begin - diagonal_high, 0)
            inner_first = tl.maximum(key_end - 1 - diagonal_high, 0)
        if KIND == "window":
            last = tl.minimum(key_end - diagonal_low, seqlen_q)
            inner_last = tl.minimum(key_begin + 1 - diagonal_low, seqlen_q)
    begin = first // BLOCK_M
    end = tl.maximum(tl.cdiv(last, BLOCK_M), begin)
    inner_begin = tl.minimum(tl.maximum(tl.cdiv(inner_first, BLOCK_M), begin), end)
    inner_end = tl.minimum(tl.maximum(inner_last // BLOCK_M, inner_begin), end)
    edges_left = inner_begin - begin
    edges = edges_left + end - inner_end

    # Keys past the end are 0 here.  What they become is not stored, and each key's sums are its
    # own.
    key = key_begin + tl.arange(0, BLOCK_N)
    key_64 = key.to(tl.int64)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    dims_v = tl.arange(0, BLOCK_DV)[None, :]
    k_mask = (key < seqlen_kv)[:, None] & (dims < head_dim)
    v_mask = (key < seqlen_kv)[:, None] & (dims_v < head_dim_v)
    k_tile = tl.load(
        k + batch_64 * stride_kb + head_kv_64 * stride_kh + key_64 * stride_ks + dims,
        mask=k_mask,
        other=0.0,
    )
    v_tile = tl.load(
        v + batch_64 * stride_vb + head_kv_64 * stride_vh + key_64 * stride_vs + dims_v,
        mask=v_mask,
        other=0.0,
    )

    dk_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in range(group):
        head_64 = head_kv_64 * group + member
        q_head = q + batch_64 * stride_qb + head_64 * stride_qh
        do_head = dout + batch_64 * stride_gb + head_64 * stride_gh
        sums = (batch_64 * heads_kv * group + head_64) * seqlen_q
        for EDGE in tl.static_range(KIND == "interval", 2):
            blocks = inner_end - inner_begin
            if EDGE == 1:
                blocks = edges
            for i in range(blocks):
                block = inner_begin + i
                if EDGE == 1:
                    block = tl.where(i < edges_left, begin + i, inner_end + (i - edges_left))
                rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
                row = tl.minimum(rows, seqlen_q - 1)
                row_64 = row.to(tl.int64)[:, None]
                q_mask = dims < head_dim
                do_mask = dims_v < head_dim_v
                if EDGE == 1:
                    low, high = _seen_keys(
                        row, tables_low, tables_high, seqlen_kv, diagonal_low, diagonal_high, KIND
                    )
                    high = tl.where(rows < seqlen_q, high, 0)
                    sees = tl.maximum(low, key_begin) < tl.minimum(high, key_end)
                    q_mask = q_mask & sees[:, None]
                    do_mask = do_mask & sees[:, None]
                    visible = (key[:, None] >= low[None, :]) & (key[:, None] < high[None, :])

                q_tile = tl.load(q_head + row_64 * stride_qs + dims, mask=q_mask, other=0.0)
                do_tile = tl.load(do_head + row_64 * stride_gs + dims_v, mask=do_mask, other=0.0)
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

    dk_rows = dk + batch_64 * stride_dkb + head_kv_64 * stride_dkh + key_64 * stride_dks
    dv_rows = dv + batch_64 * stride_dvb + head_kv_64 * stride_dvh + key_64 * stride_dvs
    written = (key < key_end)[:, None]
    tl.store(
        dk_rows + dims, (dk_tile * scale).to(dk.dtype.element_ty), mask=written & (dims < head_dim)
    )
    tl.store(
        dv_rows + dims_v, dv_tile.to(dv.dtype.element_ty), mask=written & (dims_v < head_dim_v)
    )


def _query_gradients(  # noqa: PLR0915, PLR0917
    q,
    k,
    v,
    dout,
    dq,
    lse,
    delta,
    row_low,
    row_high,
    stride_qb: tl.int64,
    stride_qh: tl.int64,
    stride_qs: tl.int64,
    stride_kb: tl.int64,
    stride_kh: tl.int64,
    stride_ks: tl.int64,
    stride_vb: tl.int64,
    stride_vh: tl.int64,
    stride_vs: tl.int64,
    stride_gb: tl.int64,
    stride_gh: tl.int64,
    stride_gs: tl.int64,
    stride_dqb: tl.int64,
    stride_dqh: tl.int64,
    stride_dqs: tl.int64,
    heads_q: tl.int32,
    group: tl.int32,
    seqlen_q: tl.int32,
    seqlen_kv: tl.int32,
    head_dim: tl.int32,
    head_dim_v: tl.int32,
    diagonal_low: tl.int32,
    diagonal_high: tl.int32,
    scale_log2: tl.float32,
    scale: tl.float32,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles
    head = (program // tiles) % heads_q
    head_64 = head.to(tl.int64)
    head_kv_64 = (head // group).to(tl.int64)
    batch_64 = ((program // tiles) // heads_q).to(tl.int64)
    tables_low = row_low
    tables_high = row_high
    if KIND == "interval":
        tables_low += batch_64 * seqlen_q
        tables_high += batch_64 * seqlen_q

    # Which blocks of keys are walked, and which need a mask: as in the forward.
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.minimum(rows, seqlen_q - 1)
    low, high = _seen_keys(
        row, tables_low, tables_high, seqlen_kv, diagonal_low, diagonal_high, KIND
    )
    some = low < high
    first = tl.min(tl.where(some, low, seqlen_kv), 0)
    last = tl.max(tl.where(some, high, 0), 0)
    begin = first // BLOCK_N
    end = tl.maximum(tl.cdiv(last, BLOCK_N), begin)
    inner_begin = tl.minimum(tl.maximum(tl.cdiv(tl.max(low, 0), BLOCK_N), begin), end)
    inner_end = tl.minimum(tl.maximum(tl.min(high, 0) // BLOCK_N, inner_begin), end)
    edges_left = inner_begin - begin
    edges = edges_left + end - inner_end

    row_64 = row.to(tl.int64)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    dims_v = tl.arange(0, BLOCK_DV)[None, :]
    q_rows = q + batch_64 * stride_qb + head_64 * stride_qh + row_64 * stride_qs
    do_rows = dout + batch_64 * stride_gb + head_64 * stride_gh + row_64 * stride_gs
    q_tile = tl.load(q_rows + dims, mask=dims < head_dim, other=0.0)
    do_tile = tl.load(do_rows + dims_v, mask=dims_v < head_dim_v, other=0.0)
    sums = (batch_64 * heads_q + head) * seqlen_q
    shift = _shift(tl.load(lse + sums + row))[:, None]
    delta_row = tl.load(delta + sums + row)[:, None]
    k_head = k + batch_64 * stride_kb + head_kv_64 * stride_kh
    v_head = v + batch_64 * stride_vb + head_kv_64 * stride_vh

    dq_tile = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for EDGE in tl.static_range(2):
        blocks = inner_end - inner_begin
        if EDGE == 1:
            blocks = edges
        for i in range(blocks):
            block = inner_begin + i
            if EDGE == 1:
                block = tl.where(i < edges_left, begin + i, inner_end + (i - edges_left))
            key = block * BLOCK_N + tl.arange(0, BLOCK_N)
            key_64 = key.to(tl.int64)[:, None]
            k_mask = dims < head_dim
            v_mask = dims_v < head_dim_v
            if EDGE == 1:
                loaded = ((key >= first) & (key < last))[:, None]
                k_mask = k_mask & loaded
                v_mask = v_mask & loaded
                visible = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])

            k_tile = tl.load(k_head + key_64 * stride_ks + dims, mask=k_mask, other=0.0)
            v_tile = tl.load(v_head + key_64 * stride_vs + dims_v, mask=v_mask, other=0.0)
            x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
            p = tl.exp2(x - shift)
            ds = p * (tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee") - delta_row)
            if EDGE == 1:
                ds = tl.where(visible, ds, 0.0)
            dq_tile = tl.dot(ds.to(k_tile.dtype), k_tile, dq_tile, input_precision="ieee")

    dq_rows = dq + batch_64 * stride_dqb + head_64 * stride_dqh + row_64 * stride_dqs
    dq_mask = (rows < seqlen_q)[:, None] & (dims < head_dim)
    tl.store(dq_rows + dims, (dq_tile * scale).to(dq.dtype.element_ty), mask=dq_mask)


row_sums_aligned, row_sums = twice(_row_sums)
key_value_gradients_aligned, key_value_gradients = twice(_key_value_gradients)
query_gradients_aligned, query_gradients = twice(_query_gradients)
