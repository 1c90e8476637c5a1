"""FlashAttention-2 forward of e4m3 inputs with log-sum-exp, in Triton; output in bfloat16, float16,
e4m3 or e5m2.

The algorithm is that of `flash_forward` (Dao, arXiv 2307.08691, algorithm 1) with both products in
8 bits, as in FlashAttention-3 (Shah et al., arXiv 2407.08608, section 3.3).  q, k and v may come
with factors dq, dk and dv (per tensor, per batch and key head, or per block of 64 or 128 rows), and
the attention is that of q dq, k dk and v dv:

    x     = (softmax_scale log2 e dq dk) (q . k)    three roundings of the factor, then one more
    m'    = max(m, max x)
    p     = 2^(x - m'),  alpha = 2^(m - m')
    l     = alpha l + sum p                         p in fp32, before it is rounded
    acc   = alpha acc + round(256 p) v              to e4m3, whose range p takes from 1 to 2^-17
    O     = acc / l (dv / 256),  LSE = ln 2 (m + log2 l)
    O8    = round(clamp(s O)), where O is in 8 bits with a factor s

FlashAttention-3 writes 256 p as 2^(x - (m' - 8)).  Where m is large that rounds m' - 8, and 256 p
may leave e4m3's range; p is multiplied here instead, which is exact, keeps 256 p at most 256, and
leaves l and LSE free of the factor.

Factors, the step of the softmax, and what matrix units do to sums of 8-bit products: `eight_bits`.
Both 8-bit operands of wgmma and of mma.sync must run along the sum, which V does not: Triton
transposes its tile on the way, in registers.

Compiled without fp fusion: a fused q.k * factor - m would subtract a rounded product from an exact
one, and the largest probability would no longer be exactly 1.

Masks, walk over the keys and builds are those of `flash_forward`.
"""

from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.masks import mask_build, mask_tables
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
    Contract,
    Numerics,
    Output,
    Products,
    RowSum,
    Softmax,
    Support,
    Variant,
    Workspace,
)


def _fp8_forward(  # noqa: PLR0915, PLR0917
    q,  # (batch, heads_q, seqlen_q, head_dim), any strides but the innermost, which is 1
    k,  # (batch, heads_kv, seqlen_kv, head_dim); so v and out
    v,
    out,
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
    IMPRECISE: tl.constexpr,  # products that a 13-bit accumulator may add up
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
            v_mask = dims_v[None, :] < head_dim_v
            if EDGE == 1:
                # A key that no row sees is not loaded: whatever lies there, NaN included, cannot
                # enter P V as 0 * NaN.
                loaded = (key >= first) & (key < last)
                k_mask = k_mask & loaded[:, None]
                v_mask = v_mask & loaded[:, None]

            k_rows = rows_of(k_head, steps[1], key, ALIGNED)
            k_tile = tl.load(k_rows + dims[None, :], mask=k_mask, other=0.0)
            if WIDEN:
                k_tile = k_tile.to(tl.float16)
            x = tl.dot(q_tile, tl.trans(k_tile), max_num_imprecise_acc=IMPRECISE)
            x = block_scores(x, factor, factors, batch, head_kv, begin, ROWS)
            if EDGE == 1:
                x = masked(x, key, low, high)

            v_rows = rows_of(v_head, steps[2], key, ALIGNED)
            v_tile = tl.load(v_rows + dims_v[None, :], mask=v_mask, other=0.0)
            place = batch, head_kv, begin
            m, l, acc = stepped_8(  # noqa: E741
                x, v_tile, m, l, acc, factors, place, WIDEN, IMPRECISE, ROWS
            )

    o_tile, lse_rows = finished(m, l, acc)
    o_tile = o_tile * factor_v
    if output_scale is not None:
        o_tile = saturated(o_tile * output_scale, LARGEST_OUT)
    valid = rows < seqlen_q
    o_rows = rows_of(head_of(out, steps[3], batch, head, ALIGNED), steps[3], row, ALIGNED)
    o_mask = valid[:, None] & (dims_v[None, :] < head_dim_v)
    tl.store(o_rows + dims_v[None, :], o_tile.to(out.dtype.element_ty), mask=o_mask)
    lse_rows = 0.6931471805599453 * lse_rows
    tl.store(lse + (batch * heads_q + head) * seqlen_q + rows, lse_rows, mask=valid)


aligned, general = twice(_fp8_forward)


def launch(args: AttentionArgs, out: Tensor, lse: Tensor | None, *, widen: bool) -> Launch:
    """How the kernel is launched for these arguments; raises `Unsupported` outside SUPPORT.

    widen: multiply in fp16, where an 8-bit product cannot be promoted (sm_89).
    """
    SUPPORT.check(args, out)
    mask = mask_build(args)
    bucket = max(BUCKETS[0], head_dim_bucket(max(args.head_dim, args.head_dim_v)))
    fast = is_aligned(args, out)
    blocks = effective_blocks(args.config, bucket, fast)
    given, shared = given_factors(args, blocks.block_n)
    return Launch(
        aligned if fast else general,
        args.batch * args.heads_q * triton.cdiv(args.seqlen_q, blocks.block_m),
        (
            *(args.q, args.k, args.v, out, lse, mask_tables(args, mask), given),
            steps(args.q, args.k, args.v, out, aligned=fast),
            head_dims(args, aligned=fast),
            *counts(args, args.heads_q, mask),
            args.softmax_scale * LOG2_E,
            output_scale(args, out),
        ),
        {
            **blocks.keywords(mask.kind, bucket, fast),
            **keywords(out, PROMOTION, shared, widen=widen),
        },
    )


def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
    """Write O to `out` and the natural-log LSE to `lse`; raises `Unsupported` outside SUPPORT."""
    kernel = launch(args, out, lse, widen=widens(args.q))
    with torch.cuda.device_of(args.q):
        kernel.run()


def builds(arch: str) -> list[Build]:
    """Every config by head-dim bucket with factors per head, each mask once, builds for
    unaligned rows, of 8-bit outputs and with factors per block; from sm_89 on."""
    if arch in ("sm_80", "sm_86"):
        return []
    found = []
    for config in VARIANT.configs:
        for shape in _BUILDS:
            head_dim, kind, aligned, out, word = shape
            name = f"{config.name}, d {head_dim}, {kind}{'' if aligned else ', unaligned'}"
            name += "" if out == "bfloat16" else f", out {out}"
            name += "" if word == "head" else f", {word}"
            compile_ = partial(_compile, config, shape, arch)
            expects = expected("float8_e4m3fn", aligned=aligned)
            budget = _SPILL_BUDGETS.get(name, {}).get(arch, 0)
            found.append(Build(name, compile_, budget, expects))
    return found


# Bytes per thread: the most of Triton 3.6 and 3.7.
_SPILL_BUDGETS = {
    "m128n64w8s2, d 64, causal": {"sm_100a": 8, "sm_120a": 16},
    "m128n64w8s2, d 32, interval": {"sm_100a": 8},
    "m64n32w4s2, d 128, full": {"sm_100a": 8},
    "m64n32w4s2, d 256, window": {"sm_89": 20, "sm_100a": 8},
}

_BUILDS = (
    (128, "full", True, "bfloat16", "head"),
    (64, "causal", True, "bfloat16", "head"),
    (256, "window", True, "bfloat16", "head"),
    (32, "interval", True, "bfloat16", "head"),
    (72, "causal", False, "bfloat16", "head"),
    (128, "causal", True, "float8_e4m3fn", "head"),
    (72, "window", False, "float8_e5m2", "head"),
    (128, "causal", True, "bfloat16", "block64"),
    (64, "full", True, "bfloat16", "block128"),
    (72, "full", False, "bfloat16", "block64"),
)


def _compile(config: Config, shape: tuple[int, str, bool, str, str], arch: str) -> Binary:
    head_dim, kind, aligned, dtype_out, word = shape
    args = arguments(config, "float8_e4m3fn", head_dim, kind, aligned=aligned)
    args = replace(args, descales=meta_descales(args, word))
    out = meta(tuple(args.q.shape), dtype_out, aligned=aligned)
    lse = meta(tuple(args.q.shape[:3]), "float32")
    return binary(launch(args, out, lse, widen=arch == "sm_89"), arch)


SUPPORT = Support(
    dtypes=("float8_e4m3fn",),
    dtypes_out=("float16", "float8_e4m3fn", "float8_e5m2"),
    descalings=("none", "tensor", "head", "block64", "block128"),
    head_dims=range(16, 257),
    masks=("full", "causal", "causal.tl", "window", "lengths", "documents", "prefix"),
    intersections=True,
    grouped_heads=True,
    separate_head_dim_v=True,
    min_seqlen=0,
    devices=("cpu", "cuda"),  # "cpu" is Triton's interpreter
    capability=(8, 9),
)

VARIANT = Variant(
    name="triton-fp8-forward",
    family="triton",
    forward=forward,
    configs=(
        Config(block_m=128, block_n=64, num_warps=8, num_stages=2),
        Config(block_m=64, block_n=32, num_warps=4, num_stages=2),
    ),
    support=SUPPORT,
    numerics=Numerics(
        products=Products(promotion=PROMOTION),
        softmax=Softmax(
            scale_roundings=3,  # scale * log2(e) on the host, then both factors
            row_sum=RowSum(apart=True, lse="log2"),
        ),
        output=Output(probability_scale=256.0, roundings=1),
    ),
    contract=Contract(
        # NaN at a key that a row of the tile sees reaches, as 0 * NaN in P V, the rows of that tile
        # that do not.
        masked_values="finite",
        batch_invariant=True,
    ),
    builds=builds,
    head_dim_buckets=BUCKETS,
)

WITNESS = (
    {
        "case": (
            "triton-fp8-forward:m64n32w4s2:accuracy:hq=4,sq=78,skv=78,d=118,dtype=float8_e4m3fn,"
            "mask=lengths.17.41,lq=sbhd.o1.xb,lk=bhsd.p4.o1,lv=sbhd.p16.o8.xh,lo=bshd.o4,ldo=sbhd,"
            "out=float16,descale=tensor,dist=one_hot_v,seed=415"
        ),
        "tensor": "out",
        "r": 0.936,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
    {
        "case": (
            "triton-fp8-forward:m64n32w4s2:accuracy:b=2,hq=3,sq=1,skv=447,d=199,dv=128,"
            "dtype=float8_e4m3fn,mask=window.63.33.tl,lq=sbhd.p8.o8,lk=sbhd.p16.o4.xbh,"
            "lv=sbhd.p4.o1.xb,lo=bhsd.o4,ldo=sbhd.p4.o8,out=float8_e4m3fn,descale=head,dist=sink,"
            "seed=37605"
        ),
        "tensor": "out",
        "r": 0.855,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
