"""The kernels of `flash_backward`, which says what they compute, and their blocks; their arguments
are as `kernels.triton.tiles` has them.

Tensors are (batch, heads, seqlen, head_dim) with any strides but the innermost, which is 1; lse and
delta float32 (batch, heads_q, seqlen_q), contiguous.  steps: the strides of the tensors, in their
order.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from kernels.triton.common import Blocks, twice
from kernels.triton.tiles import (
    block_at,
    blocks_of,
    head_of,
    inside,
    key_walk,
    own_tile,
    plain_dims,
    rows_of,
    seen_keys,
)
from verify.variant import Config


@dataclass(frozen=True)
class Walk:
    """What a config becomes for one dtype and head dim: the keys (or rows) that a program owns, and
    the rows (or keys) of one step of its walk."""

    owned: int
    walked: int
    num_warps: int
    num_stages: int


# What is launched instead of a config as declared, by its block_n.  A step holds four operands in
# registers, so that more rows spill.  32 keys (or rows) of their own keep builds that are not
# software-pipelined to mma.sync (see `flash_forward`).
_WIDE = {
    128: Walk(128, 16, num_warps=8, num_stages=2),
    64: Walk(64, 16, num_warps=8, num_stages=2),
}
_NARROW = {
    128: Walk(32, 32, num_warps=8, num_stages=2),
    64: Walk(32, 16, num_warps=8, num_stages=2),
}
# fp32 products are FMA chains, not MMA: smaller blocks, by (bucket, block_n).
_FLOAT32 = {
    (64, 128): Walk(64, 32, num_warps=8, num_stages=2),
    (64, 64): Walk(32, 32, num_warps=8, num_stages=2),
    (128, 128): Walk(32, 16, num_warps=8, num_stages=2),
    (128, 64): Walk(16, 16, num_warps=8, num_stages=2),
    (256, 128): Walk(16, 16, num_warps=16, num_stages=2),
    (256, 64): Walk(16, 16, num_warps=8, num_stages=1),
}

# Of HOPPER on sm_90: the fastest of 19 and 16 on an H100, by the bucket and by what a program owns.
# That of 64 keys spills, and is faster all the same than shorter steps that do not.
_HOPPER = {
    (64, "keys"): Walk(64, 128, num_warps=4, num_stages=2),
    (64, "rows"): Walk(128, 32, num_warps=8, num_stages=3),
    (128, "keys"): Walk(64, 64, num_warps=4, num_stages=2),
    (128, "rows"): Walk(128, 64, num_warps=8, num_stages=3),
}
HOPPER = Config(block_m=64, block_n=128, num_warps=8, num_stages=3)
_ELSEWHERE = Blocks(32, 128, num_warps=8, num_stages=2)


@dataclass(frozen=True)
class Use:
    """What blocks are for.  owned: "keys" of dK and dV, or "rows" of dQ.  atomic: dQ is added up in
    memory.  capability: the major one of the device, None in the interpreter."""

    owned: str
    atomic: bool = False
    capability: int | None = None


def effective_blocks(config: Config, dtype: str, bucket: int, aligned: bool, use: Use) -> Walk:
    """The blocks launched for a config, which must name all four; `bucket` is that of the larger
    head dim.

    dK and dV: a program owns block_n keys and walks block_m rows at a time.  dQ is the mirror
    image: it owns block_n rows and walks block_m keys.  A config is launched as declared for 16-bit
    dtypes, aligned, up to bucket 64; in atomic mode with no more than 64 keys, or dQ would spill.
    `HOPPER` is for sm_90, aligned, 16 bits, up to bucket 128, and elsewhere what m32n128w8s2 is.
    """
    given = Blocks.declared(config)
    if config == HOPPER:
        on_it = use.capability in {None, 9}
        if on_it and aligned and dtype != "float32" and bucket <= 128:
            return _HOPPER[max(bucket, 64), use.owned]
        given = _ELSEWHERE
    owned = min(given.block_n, 64) if use.atomic else given.block_n
    declared = Walk(owned, given.block_m, given.num_warps, given.num_stages)
    if dtype == "float32":
        return _FLOAT32.get((max(bucket, 64), declared.owned), declared)
    if aligned and bucket <= 64:
        return declared
    return (_WIDE if aligned and bucket <= 128 else _NARROW).get(declared.owned, declared)


LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _scaled(k_tile, scale_log2):
    """K times the scale, rounded to its dtype: its product with Q is x, that with dS dQ log2 e."""
    return (k_tile.to(tl.float32) * scale_log2).to(k_tile.dtype)


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
    heads_q: tl.int32,
    seqlen_q: tl.int32,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    _, head_dim_v = plain_dims(head_dims, ALIGNED)
    tile, head, batch = own_tile(tl.cdiv(seqlen_q, ROWS), heads_q)
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


def _key_value_gradients(  # noqa: PLR0912, PLR0915, PLR0917
    q,
    k,
    v,
    dout,
    dk,
    dv,
    dq_sums,  # float32 (batch, heads_q, seqlen_q, head_dim), contiguous, zeros; None: no dQ
    lse,
    delta,
    tables,
    steps,
    head_dims,
    heads_kv: tl.int32,
    group: tl.int32,  # query heads per key head
    seqlen_q: tl.int32,
    seqlen_kv: tl.int32,
    diagonal_low: tl.int32,  # row r sees keys from r + diagonal_low (KIND "window")
    diagonal_high: tl.int32,  # to r + diagonal_high, inclusive (KIND "causal" and "window")
    scale_log2: tl.float32,
    scale: tl.float32,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRESCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    head_dim, head_dim_v = plain_dims(head_dims, ALIGNED)
    # The first keys first, since most causal rows see them.
    tile, head_kv, batch = own_tile(tl.cdiv(seqlen_kv, BLOCK_N), heads_kv)
    key_begin = tile * BLOCK_N
    key_end = tl.minimum(key_begin + BLOCK_N, seqlen_kv)
    head_kv_64 = head_kv.to(tl.int64)
    sizes = seqlen_q, seqlen_kv, diagonal_low, diagonal_high

    # Rows [first, last) hold those that see a key of this block; of these, [inner_first,
    # inner_last) see all of it.
    if KIND == "interval":
        SCANNED: tl.constexpr = 1024
        firsts = tl.zeros([SCANNED], tl.int32) + seqlen_q
        lasts = tl.zeros([SCANNED], tl.int32)
        for start in range(0, seqlen_q, SCANNED):
            scanned = start + tl.arange(0, SCANNED)
            row = tl.minimum(scanned, seqlen_q - 1)
            low, high = seen_keys(row, tables, batch, sizes, KIND)
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
            first = tl.maximum(key_begin - diagonal_high, 0)
            inner_first = tl.maximum(key_end - 1 - diagonal_high, 0)
        if KIND == "window":
            last = tl.minimum(key_end - diagonal_low, seqlen_q)
            inner_last = tl.minimum(key_begin + 1 - diagonal_low, seqlen_q)
    if dq_sums is not None:
        # Keys past the end enter dQ: P of them, 2^(0 - LSE), may be infinite.
        inner_last = tl.where(key_begin + BLOCK_N > seqlen_kv, inner_first, inner_last)
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
    factor = scale_log2
    dq_factor = scale
    if PRESCALED:
        k_tile = _scaled(k_tile, scale_log2)
        factor = 1.0
        dq_factor = LN_2

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
                    low, high = seen_keys(row, tables, batch, sizes, KIND)
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
                x = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee") * factor
                p = tl.exp2(x - shift[None, :])
                if EDGE == 1:
                    p = tl.where(visible, p, 0.0)
                dv_tile = tl.dot(p.to(do_tile.dtype), do_tile, dv_tile, input_precision="ieee")
                ds = p * (
                    tl.dot(v_tile, tl.trans(do_tile), input_precision="ieee") - delta_row[None, :]
                )
                if EDGE == 1:
                    ds = tl.where(visible, ds, 0.0)
                ds = ds.to(q_tile.dtype)
                dk_tile = tl.dot(ds, q_tile, dk_tile, input_precision="ieee")
                if dq_sums is not None:
                    k_seen = k_tile
                    if EDGE == 1:  # a NaN at a key that no row sees would enter as 0 * NaN
                        seen = tl.max(visible.to(tl.int32), 1) > 0
                        k_seen = tl.where(seen[:, None], k_tile, 0.0)
                    dq_part = tl.dot(tl.trans(ds), k_seen, input_precision="ieee") * dq_factor
                    tl.atomic_add(
                        dq_sums + (sums + row).to(tl.int64)[:, None] * head_dim + dims,
                        dq_part,
                        mask=(rows < seqlen_q)[:, None] & (dims < head_dim),
                        sem="relaxed",
                    )

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
    heads_q: tl.int32,
    group: tl.int32,  # query heads per key head
    seqlen_q: tl.int32,
    seqlen_kv: tl.int32,
    diagonal_low: tl.int32,  # row r sees keys from r + diagonal_low (KIND "window")
    diagonal_high: tl.int32,  # to r + diagonal_high, inclusive (KIND "causal" and "window")
    scale_log2: tl.float32,
    scale: tl.float32,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRESCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    head_dim, head_dim_v = plain_dims(head_dims, ALIGNED)
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, head, batch = own_tile(tiles, heads_q)
    tile = tiles - 1 - tile
    head_64 = head.to(tl.int64)
    head_kv_64 = (head // group).to(tl.int64)

    # Which blocks of keys are walked, and which need a mask: as in the forward.
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.minimum(rows, seqlen_q - 1)
    sizes = seqlen_q, seqlen_kv, diagonal_low, diagonal_high
    low, high = seen_keys(row, tables, batch, sizes, KIND)
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

    factor = scale_log2
    dq_factor = scale
    if PRESCALED:
        factor = 1.0
        dq_factor = LN_2

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
            if PRESCALED:
                k_tile = _scaled(k_tile, scale_log2)
            x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * factor
            p = tl.exp2(x - shift)
            ds = p * (tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee") - delta_row)
            if EDGE == 1:
                ds = tl.where(visible, ds, 0.0)
            dq_tile = tl.dot(ds.to(k_tile.dtype), k_tile, dq_tile, input_precision="ieee")

    dq_rows = rows_of(head_of(dq, steps[4], batch, head_64, ALIGNED), steps[4], row, ALIGNED)
    dq_mask = (rows < seqlen_q)[:, None] & (dims < head_dim)
    tl.store(dq_rows + dims, (dq_tile * dq_factor).to(dq.dtype.element_ty), mask=dq_mask)


row_sums_aligned, row_sums = twice(_row_sums)
key_value_gradients_aligned, key_value_gradients = twice(_key_value_gradients)
query_gradients_aligned, query_gradients = twice(_query_gradients)
