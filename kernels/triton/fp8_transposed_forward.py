"""FlashAttention-2 forward of 8-bit inputs whose V is stored transposed, in Triton.

q, k and v are in e4m3 or e5m2, and V lies as (batch, heads_kv, head_dim_v, seqlen_kv): the storage
`transposedv`.  The algorithm, its factors and its roundings are those of `fp8_forward`, with P in
the inputs' dtype; output is in bfloat16, float16, e4m3 or e5m2.

Both 8-bit operands of wgmma and of mma.sync must run along the sum, which for P V are the keys.
`fp8_forward` gets V by rows and transposes each tile in registers.  Here the rows of a tile run
along the keys already, and one that needs no mask goes from the asynchronous copy into the product.

A row of V holds one number for each key, and masks keys inside it.  A mask of single bytes would
take single loads, so an aligned tile is loaded in pieces of 16 keys, if a row of the tile sees one
of them, and what none sees becomes 0 afterwards: it may be NaN, and 0 * NaN is not 0.  A piece can
reach up to 15 keys beyond seqlen_kv, into the pitch of its row, a multiple of 16.  Behind the last
row there may be none: where the storage ends there, V is loaded key by key.

There are three variants.  `triton-fp8-transposed-forward` adds the sums of 32 products in fp32, as
`fp8_forward` does.  `triton-fp8-transposed-block-forward` takes on sm_90 the 13 bits of wgmma for
all of Q K^T and for the P V of a block, whose result is added in fp32: less than half the additions
(FlashAttention-3 does so without the last step).  `triton-fp8-transposed-wide-forward` does it with
blocks of 128 keys, on Hopper, up to head dim 128; 64 keys cannot have a factor of their own there.

Masks, walk over the keys and builds are those of `flash_forward`.
"""

from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.masks import mask_build, mask_tables
from kernels.triton import fp8_forward
from kernels.triton.common import (
    LOG2_E,
    Launch,
    counts,
    head_dim_bucket,
    head_dims,
    is_aligned,
    steps,
    twice,
)
from kernels.triton.compile import arguments, binary, expected, meta
from kernels.triton.eight_bits import (
    BUCKETS,
    PROMOTION,
    block_scores,
    effective_blocks,
    given_factors,
    keywords,
    meta_descales,
    output_scale,
    saturated,
    stepped_8,
    tile_factors,
    widens,
)
from kernels.triton.fp8_transposed_builds import BUILDS, SPILL_BUDGETS
from kernels.triton.online_softmax import finished, masked, started
from kernels.triton.tiles import (
    block_at,
    blocks_of,
    head_of,
    key_walk,
    own_tile,
    plain_dims,
    rows_of,
    seen_keys,
)
from verify.variant import (
    AttentionArgs,
    Binary,
    Build,
    Config,
    Stored,
    Support,
    Variant,
    Workspace,
    arch_named,
)

STORAGE = "transposedv"
PIECE = tl.constexpr(16)  # keys: bytes of an asynchronous copy


def _fp8_transposed_forward(  # noqa: PLR0915, PLR0917
    q,  # (batch, heads_q, seqlen_q, head_dim), any strides but the innermost, which is 1
    k,  # (batch, heads_kv, seqlen_kv, head_dim)
    v,  # (batch, heads_kv, head_dim_v, seqlen_kv), any strides but the innermost, which is 1
    out,  # (batch, heads_q, seqlen_q, head_dim_v)
    lse,  # float32 (batch, heads_q, seqlen_q), contiguous
    tables,  # of the keys that rows see
    factors,  # of q, k and v, float32, and their strides; None and None if there are none
    steps,  # strides of q, k, v and out
    head_dims,
    heads_q: tl.int32,
    group: tl.int32,  # query heads per key head
    seqlen_q: tl.int32,
    seqlen_kv: tl.int32,
    diagonal_low: tl.int32,  # row r sees keys from r + diagonal_low (KIND "window")
    diagonal_high: tl.int32,  # to r + diagonal_high, inclusive (KIND "causal" and "window")
    scale_log2: tl.float32,
    output_scale,  # float32, of an 8-bit O; None if O has 16 bits
    KIND: tl.constexpr,
    WIDEN: tl.constexpr,  # multiply in fp16
    IMPRECISE: tl.constexpr,  # products that a 13-bit accumulator may add up; None: a block's
    ROWS: tl.constexpr,  # that share a factor; 0: all of a head
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    LARGEST_OUT: tl.constexpr,  # finite number of an 8-bit O; None if O has 16 bits
):
    head_dim, head_dim_v = plain_dims(head_dims, ALIGNED)
    # The last tile first, since causal rows grow longer.
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, head, batch = own_tile(tiles, heads_q)
    tile = tiles - 1 - tile
    head_kv = (head // group).to(tl.int64)

    # Rows past the end repeat the last one: they neither widen the tile's bounds nor read out of
    # bounds.
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.minimum(rows, seqlen_q - 1)
    sizes = seqlen_q, seqlen_kv, diagonal_low, diagonal_high
    low, high = seen_keys(row, tables, batch, sizes, KIND)
    first, last, walk = key_walk(low, high, seqlen_kv, BLOCK_N)

    heads = head, head_kv
    factor, factor_v = tile_factors(factors, scale_log2, batch, heads, row, ROWS)

    keys = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    q_rows = rows_of(head_of(q, steps[0], batch, head, ALIGNED), steps[0], row, ALIGNED)
    q_tile = tl.load(q_rows + dims[None, :], mask=dims[None, :] < head_dim, other=0.0)
    if WIDEN:
        q_tile = q_tile.to(tl.float16)
    k_head = head_of(k, steps[1], batch, head_kv, ALIGNED)
    v_head = head_of(v, steps[2], batch, head_kv, ALIGNED)

    m, l, acc = started(BLOCK_M, BLOCK_DV)  # noqa: E741 - the paper's name
    for EDGE in tl.static_range(2):
        for i in range(blocks_of(walk, EDGE)):
            begin = block_at(walk, i, EDGE) * BLOCK_N
            key = begin + keys
            k_mask = dims[None, :] < head_dim
            v_mask = dims_v[:, None] < head_dim_v
            if EDGE == 1:
                # What lies at a key that no row sees, NaN included, cannot enter P V as 0 * NaN.
                seen = (key >= first) & (key < last)
                k_mask = k_mask & seen[:, None]
                if ALIGNED:
                    piece = key // PIECE
                    in_pieces = (piece >= first // PIECE) & (piece < tl.cdiv(last, PIECE))
                    v_mask = v_mask & in_pieces[None, :]
                else:
                    v_mask = v_mask & seen[None, :]

            k_rows = rows_of(k_head, steps[1], key, ALIGNED)
            k_tile = tl.load(k_rows + dims[None, :], mask=k_mask, other=0.0)
            if WIDEN:
                k_tile = k_tile.to(tl.float16)
            x = tl.dot(q_tile, tl.trans(k_tile), max_num_imprecise_acc=IMPRECISE)
            x = block_scores(x, factor, factors, batch, head_kv, begin, ROWS)
            if EDGE == 1:
                x = masked(x, key, low, high)

            v_rows = rows_of(v_head, steps[2], dims_v, ALIGNED)
            v_tile = tl.load(v_rows + key[None, :], mask=v_mask, other=0.0)
            if ALIGNED and EDGE == 1:
                v_tile = tl.where(seen[None, :], v_tile, 0.0)
            place = batch, head_kv, begin
            m, l, acc = stepped_8(  # noqa: E741
                x, tl.trans(v_tile), m, l, acc, factors, place, WIDEN, IMPRECISE, ROWS
            )

    o_tile, lse_rows = finished(m, l, acc)
    o_tile = o_tile * factor_v
    if output_scale is not None:
        o_tile = saturated(o_tile * output_scale, LARGEST_OUT)
    lse_rows = 0.6931471805599453 * lse_rows
    valid = rows < seqlen_q
    o_rows = rows_of(head_of(out, steps[3], batch, head, ALIGNED), steps[3], row, ALIGNED)
    o_mask = valid[:, None] & (dims_v[None, :] < head_dim_v)
    tl.store(o_rows + dims_v[None, :], o_tile.to(out.dtype.element_ty), mask=o_mask)
    tl.store(lse + (batch * heads_q + head) * seqlen_q + rows, lse_rows, mask=valid)


aligned, general = twice(_fp8_transposed_forward)


def whole_pieces(v: Tensor) -> bool:
    """Whether the last PIECE of every row lies in V's storage, so that it may be read whole."""
    pieces = -(-v.shape[3] // PIECE.value)
    rows = sum((size - 1) * step for size, step in zip(v.shape[:3], v.stride()[:3], strict=True))
    return v.storage_offset() + rows + pieces * PIECE.value <= v.untyped_storage().nbytes()


def launch(
    promotion: int | str,
    support: Support,
    args: AttentionArgs,
    out: Tensor,
    lse: Tensor | None,
    *,
    widen: bool,
) -> Launch:
    """How the kernel is launched for these arguments; raises `Unsupported` outside the support.

    promotion: as `Products.promotion`: 32, or "block".
    widen: multiply in fp16, where an 8-bit product cannot be promoted (sm_89).
    """
    support.check(args, out)
    v = args.stored["v"].tensors[""]
    mask = mask_build(args)
    bucket = max(BUCKETS[0], head_dim_bucket(max(args.head_dim, args.head_dim_v)))
    fast = is_aligned(args, out, v) and whole_pieces(v)
    blocks = effective_blocks(args.config, bucket, fast)
    given, shared = given_factors(args, blocks.block_n)
    return Launch(
        aligned if fast else general,
        args.batch * args.heads_q * triton.cdiv(args.seqlen_q, blocks.block_m),
        (
            *(args.q, args.k, v, out, lse, mask_tables(args, mask), given),
            steps(args.q, args.k, v, out, aligned=fast),
            head_dims(args, aligned=fast),
            *counts(args, args.heads_q, mask),
            args.softmax_scale * LOG2_E,
            output_scale(args, out),
        ),
        {
            **blocks.keywords(mask.kind, bucket, fast),
            **keywords(out, promotion, shared, widen=widen),
        },
    )


def forward(
    promotion: int | str,
    support: Support,
    args: AttentionArgs,
    out: Tensor,
    lse: Tensor | None,
    workspace: Workspace,
) -> None:
    """Write O to `out` and the natural-log LSE to `lse`; raises `Unsupported` outside the
    support."""
    kernel = launch(promotion, support, args, out, lse, widen=widens(args.q))
    with torch.cuda.device_of(args.q):
        kernel.run()


def builds(
    promotion: int | str, support: Support, configs: tuple[Config, ...], arch: str
) -> list[Build]:
    """Every config with factors per head, by head-dim bucket, and each mask once; besides builds
    for unaligned rows, 8-bit outputs and factors per block.  Those outside the support are left
    out."""
    if not support.has(arch_named(arch).capability):
        return []
    found = []
    for config in configs:
        for dtype, *shape in BUILDS:
            head_dim, kind, aligned, out, word = shape
            if head_dim not in support.head_dims or word not in support.descalings:
                continue
            name = f"{config.name}, {dtype}, d {head_dim}, {kind}{'' if aligned else ', unaligned'}"
            name += "" if out == "bfloat16" else f", out {out}"
            name += "" if word == "head" else f", {word}"
            compile_ = partial(_compile, promotion, support, config, dtype, tuple(shape), arch)
            budget = SPILL_BUDGETS[promotion].get(name, {}).get(arch, 0)
            found.append(Build(name, compile_, budget, expected(dtype, aligned=aligned)))
    return found


def _compile(
    promotion: int | str,
    support: Support,
    config: Config,
    dtype: str,
    shape: tuple[int, str, bool, str, str],
    arch: str,
) -> Binary:
    head_dim, kind, aligned, dtype_out, word = shape
    args = arguments(config, dtype, head_dim, kind, aligned=aligned)
    factors = meta_descales(args, word)
    columns = meta(tuple(args.v.mT.shape), dtype, aligned=aligned)
    stored = {"v": Stored(STORAGE, STORAGE, {"": columns}, ("v",))}
    out = meta(tuple(args.q.shape), dtype_out, aligned=aligned)
    lse = meta(tuple(args.q.shape[:3]), "float32")
    args = replace(args, descales=factors, stored=stored)
    return binary(launch(promotion, support, args, out, lse, widen=arch == "sm_89"), arch)


SUPPORT = replace(
    fp8_forward.SUPPORT,
    dtypes=("float8_e4m3fn", "float8_e5m2"),
    storages=(STORAGE,),
)


WIDE_SUPPORT = replace(
    SUPPORT,
    descalings=("none", "tensor", "head", "block128"),
    head_dims=range(16, 129),
    capability=(9, 0),
    max_capability=(9, 0),
)


def _variant(
    name: str, promotion: int | str, configs: tuple[Config, ...], support: Support
) -> Variant:
    numerics = fp8_forward.VARIANT.numerics
    return replace(
        fp8_forward.VARIANT,
        name=name,
        forward=partial(forward, promotion, support),
        configs=configs[:1],
        further_configs=lambda: configs,
        support=support,
        numerics=replace(numerics, products=replace(numerics.products, promotion=promotion)),
        builds=partial(builds, promotion, support, configs),
    )


VARIANTS = [
    _variant(
        "triton-fp8-transposed-forward",
        PROMOTION,
        fp8_forward.VARIANT.configs[::-1],
        SUPPORT,
    ),
    # The interpreter knows no sums of 13 bits: there it would be the first variant once more.
    _variant(
        "triton-fp8-transposed-block-forward",
        "block",
        (Config(block_m=128, block_n=64, num_warps=8, num_stages=3),),
        replace(SUPPORT, devices=("cuda",)),
    ),
    _variant(
        "triton-fp8-transposed-wide-forward",
        "block",
        (Config(block_m=64, block_n=128, num_warps=4, num_stages=3),),
        replace(WIDE_SUPPORT, devices=("cuda",)),
    ),
]

WITNESS = (
    {
        "case": (
            "triton-fp8-transposed-forward:m64n32w4s2:accuracy:b=3,hq=4,sq=1,skv=1,d=40,dv=242,"
            "dtype=float8_e4m3fn,mask=prefix.128,lq=bhsd.p16,lk=sbhd.o4,lv=transposedv.p16,"
            "lo=bshd.p16.o1,ldo=bshd.p8.o8,out=float8_e4m3fn,oscale=0.0078125,dist=negative_lse,"
            "seed=7109285"
        ),
        "tensor": "out",
        "r": 0.941,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
    {
        "case": (
            "triton-fp8-transposed-forward:m64n32w4s2:accuracy:b=3,hq=4,sq=1,skv=1,d=40,dv=242,"
            "dtype=float8_e4m3fn,mask=prefix.128,lq=bhsd.p16,lk=sbhd.o4,lv=transposedv.p16,"
            "lo=bshd.p16.o1,ldo=bshd.p8.o8,out=float8_e4m3fn,oscale=0.0078125,dist=negative_lse,"
            "seed=7109285"
        ),
        "tensor": "out",
        "r": 0.941,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
    {
        "case": (
            "triton-fp8-transposed-block-forward:m128n64w8s3:accuracy:hq=4,sq=479,skv=255,d=130,"
            "dtype=float8_e4m3fn,mask=documents.3_7_17_127_16_85,lq=bshd,lk=bshd,"
            "lv=transposedv.p64,lo=bshd,ldo=bshd,out=float8_e4m3fn,oscale=0.0078125,"
            "descale=tensor,dist=sink,seed=33"
        ),
        "tensor": "out",
        "r": 0.847,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
