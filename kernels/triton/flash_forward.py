"""FlashAttention-2 forward with log-sum-exp, in Triton.

One program owns BLOCK_M query rows of one head and walks over the keys in blocks of BLOCK_N,
keeping per row the running maximum m, the running denominator l and the un-normalised output acc
(Dao, arXiv 2307.08691, algorithm 1):

    x     = (softmax_scale log2 e) (q . k)      one fp32 product: x - m is exactly 0 at the maximum
    m'    = max(m, max x)
    p     = 2^(x - m'),  alpha = 2^(m - m')
    l     = alpha l + sum p                     p in fp32, before it is rounded
    acc   = alpha acc + round(p) v              p rounded to v's dtype, sums in fp32
    O     = acc / l,  LSE = ln 2 (m + log2 l)   one division and one rounding at the end

Compiled without fp fusion: a fused q.k * scale - m would subtract a rounded product from an exact
one, and the largest probability would no longer be exactly 1.

Every supported mask shows each row one interval of keys [low, high), found by comparison with a
diagonal (causal, window) or read from a table (everything else).  Blocks that every row of the tile
sees whole need no mask and come first, then the blocks at the edges; blocks that no row sees are
never loaded, nor are keys outside the tile's own [min low, max high).

A build is chosen by dtype, head-dim bucket, mask kind (`full`, `causal`, `window`, `interval`),
blocks and one bit, "aligned"; lengths, offsets, scale and head counts are plain arguments.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.masks import mask_build, mask_tables
from kernels.triton.common import (
    BUCKETS,
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
from kernels.triton.family import CONTRACT, NUMERICS, SUPPORT, effective_blocks
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
    Variant,
    Workspace,
)


def _flash_forward(  # noqa: PLR0915, PLR0917
    q,  # (batch, heads_q, seqlen_q, head_dim), any strides but the innermost, which is 1
    k,  # (batch, heads_kv, seqlen_kv, head_dim); so v and out
    v,
    out,
    lse,  # float32 (batch, heads_q, seqlen_q), contiguous
    tables,  # of the keys that rows see
    steps,  # strides of q, k, v and out
    head_dims,
    heads_q: tl.int32,
    group: tl.int32,  # query heads per key head
    seqlen_q: tl.int32,
    seqlen_kv: tl.int32,
    diagonal_low: tl.int32,  # row r sees keys from r + diagonal_low (KIND "window")
    diagonal_high: tl.int32,  # to r + diagonal_high, inclusive (KIND "causal" and "window")
    scale_log2: tl.float32,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
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

    keys = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    q_rows = rows_of(head_of(q, steps[0], batch, head, ALIGNED), steps[0], row, ALIGNED)
    q_tile = tl.load(q_rows + dims[None, :], mask=dims[None, :] < head_dim, other=0.0)
    k_head = head_of(k, steps[1], batch, head_kv, ALIGNED)
    v_head = head_of(v, steps[2], batch, head_kv, ALIGNED)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741 - the paper's name
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for EDGE in tl.static_range(2):
        for i in range(blocks_of(walk, EDGE)):
            block = block_at(walk, i, EDGE)
            key = block * BLOCK_N + keys
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
            x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
            if EDGE == 1:
                x = tl.where(
                    (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]),
                    x,
                    float("-inf"),
                )

            m_new = tl.maximum(m, tl.max(x, 1))
            # While a row has seen no key, m is -inf: subtract 0 instead, since -inf - -inf is NaN.
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(x - shift[:, None])
            alpha = tl.exp2(m - shift)
            l = l * alpha + tl.sum(p, 1)  # noqa: E741
            acc = acc * alpha[:, None]
            v_rows = rows_of(v_head, steps[2], key, ALIGNED)
            v_tile = tl.load(v_rows + dims_v[None, :], mask=v_mask, other=0.0)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
            m = m_new

    # An empty row has l = 0, acc = 0 and m = -inf, so O = 0 and LSE = -inf.
    denominator = tl.where(l == 0.0, 1.0, l)
    o_tile = acc / denominator[:, None]
    lse_rows = 0.6931471805599453 * (m + tl.log2(denominator))
    valid = rows < seqlen_q
    o_rows = rows_of(head_of(out, steps[3], batch, head, ALIGNED), steps[3], row, ALIGNED)
    o_mask = valid[:, None] & (dims_v[None, :] < head_dim_v)
    tl.store(o_rows + dims_v[None, :], o_tile.to(out.dtype.element_ty), mask=o_mask)
    tl.store(lse + (batch * heads_q + head) * seqlen_q + rows, lse_rows, mask=valid)


aligned, general = twice(_flash_forward)


def launch(args: AttentionArgs, out: Tensor, lse: Tensor | None) -> Launch:
    """How the kernel is launched for these arguments; raises `Unsupported` outside SUPPORT."""
    SUPPORT.check(args, out)
    mask = mask_build(args)
    bucket = head_dim_bucket(max(args.head_dim, args.head_dim_v))
    fast = is_aligned(args, out)
    blocks = effective_blocks(args.config, args.dtype, bucket, fast)
    return Launch(
        aligned if fast else general,
        args.batch * args.heads_q * triton.cdiv(args.seqlen_q, blocks.block_m),
        (
            *(args.q, args.k, args.v, out, lse, mask_tables(args, mask)),
            steps(args.q, args.k, args.v, out, aligned=fast),
            head_dims(args, aligned=fast),
            *counts(args, args.heads_q, mask),
            args.softmax_scale * LOG2_E,
        ),
        blocks.keywords(mask.kind, bucket, fast),
    )


def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
    """Write O to `out` and the natural-log LSE to `lse`; raises `Unsupported` outside SUPPORT."""
    kernel = launch(args, out, lse)
    with torch.cuda.device_of(args.q):
        kernel.run()


def builds(arch: str) -> list[Build]:
    """Each config and dtype at two head dims, so that each kind of mask occurs, and two builds for
    unaligned rows."""
    found = []
    for number, dtype, head_dim, kind, aligned in _BUILDS:
        config = VARIANT.configs[number]
        name = f"{config.name}, {dtype}, d {head_dim}, {kind}{'' if aligned else ', unaligned'}"
        compile_ = partial(_compile, config, dtype, head_dim, kind, aligned, arch)
        budget = _SPILL_BUDGETS.get(name, {}).get(arch, 0)
        found.append(Build(name, compile_, budget, expected(dtype, aligned=aligned)))
    return found


# Bytes per thread: the most of Triton 3.6 and 3.7.
_SPILL_BUDGETS = {
    "m64n32w4s2, bfloat16, d 64, full, unaligned": {"sm_80": 40, "sm_100a": 8},
    "m128n64w8s2, float32, d 64, causal": {"sm_80": 48},
    "m128n64w8s2, float32, d 128, full": {"sm_86": 16, "sm_89": 16, "sm_90a": 28, "sm_100a": 16},
    "m64n32w4s2, float32, d 128, interval": {
        "sm_80": 32,
        "sm_86": 8,
        "sm_89": 8,
        "sm_120a": 36,
    },
}


_BUILDS = (
    (0, "float16", 64, "full", True),
    (0, "float16", 128, "causal", True),
    (0, "bfloat16", 64, "window", True),
    (0, "bfloat16", 128, "interval", True),
    (0, "float32", 64, "causal", True),
    (0, "float32", 128, "full", True),
    (1, "float16", 64, "interval", True),
    (1, "float16", 128, "window", True),
    (1, "bfloat16", 64, "full", False),
    (1, "bfloat16", 128, "causal", False),
    (1, "float32", 64, "window", True),
    (1, "float32", 128, "interval", True),
    (2, "float16", 128, "full", True),
    (2, "bfloat16", 64, "causal", True),
    (2, "bfloat16", 128, "window", True),
)


def _compile(
    config: Config, dtype: str, head_dim: int, kind: str, aligned: bool, arch: str
) -> Binary:
    args = arguments(config, dtype, head_dim, kind, aligned=aligned)
    out = meta(tuple(args.q.shape), dtype, aligned=aligned)
    lse = meta(tuple(args.q.shape[:3]), "float32")
    return binary(launch(args, out, lse), arch)


VARIANT = Variant(
    name="triton-flash-forward",
    family="triton",
    forward=forward,
    configs=(
        Config(block_m=128, block_n=64, num_warps=8, num_stages=2),
        Config(block_m=64, block_n=32, num_warps=4, num_stages=2),
        # On Hopper the fastest: what it loads is two blocks ahead.
        Config(block_m=128, block_n=64, num_warps=8, num_stages=3),
    ),
    support=SUPPORT,
    numerics=NUMERICS,
    contract=CONTRACT,
    builds=builds,
    head_dim_buckets=BUCKETS,
)

WITNESS = (
    {
        "case": (
            "triton-flash-forward:m128n64w8s2:accuracy:b=5,hq=21,hkv=3,sq=18,skv=2,d=79,"
            "dtype=float16,mask=causal.tl,scale=0.125,dist=low_rank,seed=27128"
        ),
        "tensor": "out",
        "r": 0.985,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
    {
        "case": (
            "triton-flash-forward:m128n64w8s2:accuracy:b=5,hq=21,hkv=3,sq=18,skv=2,d=79,"
            "dtype=float16,mask=causal.tl,scale=0.125,dist=low_rank,seed=27128"
        ),
        "tensor": "out",
        "r": 0.985,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
