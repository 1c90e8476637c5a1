"""Split-KV decoding in Triton: attention of few queries, its keys dealt out to several programs.

A kernel for parts, one for the merge (flash decoding).  A program of the first owns one part of the
keys of one key head, and BLOCK_M rows: those of all query heads of the group, so that K and V are
read once for a group.  It walks over its blocks of keys as `flash_forward` does, and leaves a
normalised O and an LSE in base 2 in the workspace:

    O_i = acc / l,  L_i = m + log2 l                O_i in fp32, or rounded to the inputs' dtype

The blocks that a tile's rows see are dealt out evenly, in order, so that no part waits on keys that
the mask hides; a part that is left without a block, and a row that sees no key of its part, have
O_i = 0 and L_i = -inf.  The second kernel merges the parts in their order, in fp32:

    M = max L_i,  w_i = 2^(L_i - M)
    O = (sum w_i O_i) / (sum w_i),  LSE = ln 2 (M + log2 sum w_i)

The number of parts is the config's `split`, and no length changes it: results repeat bit for bit,
and are those of a sequence alone.  Any number of queries is right; 1 to 16 is what this is for.
"""

from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.masks import mask_build, mask_tables
from kernels.triton import family
from kernels.triton.common import (
    BUCKETS,
    LOG2_E,
    Blocks,
    Launch,
    counts,
    head_dim_bucket,
    head_dims,
    is_aligned,
    steps,
    twice,
)
from kernels.triton.compile import arguments, binary, meta
from kernels.triton.tiles import (
    block_at,
    blocks_of,
    head_of,
    inside,
    key_walk,
    own_tile,
    plain,
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
    Maximum,
    Numerics,
    Output,
    Products,
    RowSum,
    Softmax,
    Support,
    Variant,
    Workspace,
)

_MERGED_ROWS = 16  # per program of the second kernel


def _parts(  # noqa: PLR0915, PLR0917
    q,  # (batch, heads_q, seqlen_q, head_dim), any strides but the innermost, which is 1
    k,  # (batch, heads_kv, seqlen_kv, head_dim); so v
    v,
    partial_out,  # (batch, heads_q, PARTS, seqlen_q, head_dim_v), contiguous
    partial_lse,  # float32 (batch, heads_q, PARTS, seqlen_q), contiguous
    tables,  # of the keys that rows see
    steps,  # strides of q, k and v
    head_dims,
    heads_kv: tl.int32,
    group: tl.int32,  # query heads per key head
    seqlen_q: tl.int32,
    seqlen_kv: tl.int32,
    diagonal_low: tl.int32,
    diagonal_high: tl.int32,
    scale_log2: tl.float32,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    head_dim, head_dim_v = plain_dims(head_dims, ALIGNED)
    slot, head_kv, batch = own_tile(tl.cdiv(group * seqlen_q, BLOCK_M) * PARTS, heads_kv)
    part = slot % PARTS
    head_kv_64 = head_kv.to(tl.int64)

    # Rows of the first head of the group, then of the next; those past the end repeat the last.
    packed = slot // PARTS * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = packed < group * seqlen_q
    packed = tl.minimum(packed, group * seqlen_q - 1)
    row = packed % seqlen_q
    head = (head_kv_64 * group) + packed // seqlen_q
    sizes = seqlen_q, seqlen_kv, diagonal_low, diagonal_high
    low, high = seen_keys(row, tables, batch, sizes, KIND)
    first, last, walk = key_walk(low, high, seqlen_kv, BLOCK_N)
    length = tl.cdiv(walk[3] - walk[0], PARTS)
    begin = walk[0] + part * length
    walk = inside(begin, walk[1], walk[2], tl.minimum(begin + length, walk[3]))

    keys = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    q_heads = head_of(q, steps[0], batch, head, ALIGNED)
    q_rows = (q_heads + row.to(tl.int64) * plain(steps[0][2], ALIGNED))[:, None]
    q_tile = tl.load(q_rows + dims[None, :], mask=dims[None, :] < head_dim, other=0.0)
    k_head = head_of(k, steps[1], batch, head_kv_64, ALIGNED)
    v_head = head_of(v, steps[2], batch, head_kv_64, ALIGNED)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741 - the paper's name
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for EDGE in tl.static_range(2):
        for i in range(blocks_of(walk, EDGE)):
            key = block_at(walk, i, EDGE) * BLOCK_N + keys
            k_mask = dims[None, :] < head_dim
            v_mask = dims_v[None, :] < head_dim_v
            if EDGE == 1:
                loaded = (key >= first) & (key < last)
                k_mask = k_mask & loaded[:, None]
                v_mask = v_mask & loaded[:, None]

            k_rows = rows_of(k_head, steps[1], key, ALIGNED)
            k_tile = tl.load(k_rows + dims[None, :], mask=k_mask, other=0.0)
            x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
            if EDGE == 1:
                seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
                x = tl.where(seen, x, float("-inf"))

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

    denominator = tl.where(l == 0.0, 1.0, l)
    place = ((batch * heads_kv * group + head) * PARTS + part) * seqlen_q + row
    tl.store(partial_lse + place, m + tl.log2(denominator), mask=valid)
    tl.store(
        partial_out + place[:, None] * head_dim_v + dims_v[None, :],
        (acc / denominator[:, None]).to(partial_out.dtype.element_ty),
        mask=valid[:, None] & (dims_v[None, :] < head_dim_v),
    )


def _merge(  # noqa: PLR0917
    out,  # (batch, heads_q, seqlen_q, head_dim_v), any strides but the innermost, which is 1
    lse,  # float32 (batch, heads_q, seqlen_q), contiguous
    partial_out,
    partial_lse,
    steps,
    head_dims,
    heads_q: tl.int32,
    seqlen_q: tl.int32,
    ALIGNED: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    _, head_dim_v = plain_dims(head_dims, ALIGNED)
    tile, head, batch = own_tile(tl.cdiv(seqlen_q, ROWS), heads_q)
    rows = tile * ROWS + tl.arange(0, ROWS)
    valid = rows < seqlen_q
    dims_v = tl.arange(0, BLOCK_DV)[None, :]
    mask = valid[:, None] & (dims_v < head_dim_v)
    place = (batch * heads_q + head) * PARTS * seqlen_q + rows

    m = tl.full([ROWS], float("-inf"), tl.float32)
    for part in range(PARTS):
        part_lse = tl.load(partial_lse + place + part * seqlen_q, mask=valid, other=0.0)
        m = tl.maximum(m, part_lse)
    shift = tl.where(m == float("-inf"), 0.0, m)  # no part has a key: all weights are 2^-inf
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for part in range(PARTS):
        here = place + part * seqlen_q
        weight = tl.exp2(tl.load(partial_lse + here, mask=valid, other=0.0) - shift)
        o_rows = partial_out + here[:, None] * head_dim_v + dims_v
        total += weight
        acc += weight[:, None] * tl.load(o_rows, mask=mask, other=0.0).to(tl.float32)

    denominator = tl.where(total == 0.0, 1.0, total)
    o_tile = acc / denominator[:, None]
    head_64 = head.to(tl.int64)
    o_rows = rows_of(head_of(out, steps[0], batch, head_64, ALIGNED), steps[0], rows, ALIGNED)
    tl.store(o_rows + dims_v, o_tile.to(out.dtype.element_ty), mask=mask)
    lse_rows = 0.6931471805599453 * (m + tl.log2(denominator))
    tl.store(lse + (batch * heads_q + head) * seqlen_q + rows, lse_rows, mask=valid)


parts_aligned, parts_general = twice(_parts)
merge_aligned, merge_general = twice(_merge)


def effective_blocks(config: Config, dtype: str, bucket: int) -> Blocks:
    """The blocks launched for a config, which must name all four: as declared, but for one stage
    where two would outgrow the 99 KiB of shared memory of sm_86, 89 and 120, and for more warps in
    fp32, whose products are FMA chains that spill."""
    declared = Blocks.declared(config)
    elements = declared.block_n * bucket
    stage = 2 * elements * getattr(torch, dtype).itemsize  # K and V
    stages = declared.num_stages if declared.num_stages * stage <= 80 * 1024 else 1
    chains = min(16, elements // 512) if dtype == "float32" else 0
    return Blocks(declared.block_m, declared.block_n, max(declared.num_warps, chains), stages)


def launches(
    args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace
) -> tuple[Launch, Launch]:
    """How the kernels are launched, in their order."""
    mask = mask_build(args)
    bucket = head_dim_bucket(max(args.head_dim, args.head_dim_v))
    fast = is_aligned(args, out)
    blocks = effective_blocks(args.config, args.dtype, bucket)
    parts = _split(args.config)
    partials = workspace["partial_out"], workspace["partial_lse"]
    tiles = triton.cdiv(args.heads_q // args.heads_kv * args.seqlen_q, blocks.block_m)
    return (
        Launch(
            parts_aligned if fast else parts_general,
            args.batch * args.heads_kv * tiles * parts,
            (
                *(args.q, args.k, args.v, *partials, mask_tables(args, mask)),
                steps(args.q, args.k, args.v, aligned=fast),
                head_dims(args, aligned=fast),
                *counts(args, args.heads_kv, mask),
                args.softmax_scale * LOG2_E,
            ),
            {**blocks.keywords(mask.kind, bucket, fast), "PARTS": parts},
        ),
        Launch(
            merge_aligned if fast else merge_general,
            args.batch * args.heads_q * triton.cdiv(args.seqlen_q, _MERGED_ROWS),
            (
                *(out, lse, *partials),
                steps(out, aligned=fast),
                head_dims(args, aligned=fast),
                *(args.heads_q, args.seqlen_q),
            ),
            {
                "ALIGNED": fast,
                "PARTS": parts,
                "ROWS": _MERGED_ROWS,
                "BLOCK_DV": bucket,
                "num_warps": 4,
                "enable_fp_fusion": False,
            },
        ),
    )


def _split(config: Config) -> int:
    return int(dict(config.options)["split"])


def forward(
    support: Support, args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace
) -> None:
    """Write O to `out` and the natural-log LSE to `lse`; raises `Unsupported` outside the
    support."""
    support.check(args, out)
    kernels = launches(args, out, lse, workspace)
    with torch.cuda.device_of(args.q):
        for kernel in kernels:
            kernel.run()


def _workspace(stored: str, args: AttentionArgs) -> dict[str, tuple[tuple[int, ...], str]]:
    """O and LSE of every part; stored: the dtype of that O, or "input"."""
    rows = args.batch, args.heads_q, _split(args.config), args.seqlen_q
    dtype = args.dtype if stored == "input" else stored
    return {
        "partial_out": ((*rows, args.head_dim_v), dtype),
        "partial_lse": (rows, "float32"),
    }


def builds(stored: str, arch: str) -> list[Build]:
    """The parts of each dtype by config, bucket, mask and alignment, and a merge."""
    found = []
    for kernel, number, dtype, head_dim, kind, aligned in _BUILDS[stored]:
        config = CONFIGS[number]
        name = (
            f"{('parts', 'merge')[kernel]}, {config.name}, {dtype}, d {head_dim},"
            f" {kind}{'' if aligned else ', unaligned'}"
        )
        compile_ = partial(_compile, stored, kernel, config, dtype, (head_dim, kind, aligned), arch)
        budget = _SPILL_BUDGETS.get(name, {}).get(arch, 0)
        expects = ("MMA",) if not kernel and dtype != "float32" else ()
        found.append(Build(name, compile_, budget, expects))
    return found


# Bytes per thread: the most of Triton 3.6 and 3.7.  Only fp32, which no tensor core multiplies.
_SPILL_BUDGETS = {
    "parts, m16n64w8s2-split_16, float32, d 128, full": {
        "sm_80": 340,
        "sm_86": 340,
        "sm_89": 340,
        "sm_90a": 340,
        "sm_100a": 400,
        "sm_120a": 400,
    },
}

_BUILDS = {
    "float32": (
        (0, 0, "float16", 128, "causal", True),
        (1, 0, "float16", 128, "full", True),
        (0, 0, "bfloat16", 256, "window", True),
        (0, 1, "bfloat16", 64, "full", False),
        (0, 0, "float32", 64, "interval", True),
        (0, 1, "float32", 128, "full", True),
    ),
    "input": ((0, 0, "bfloat16", 64, "full", True), (1, 0, "bfloat16", 64, "full", False)),
}


def _compile(
    stored: str, kernel: int, config: Config, dtype: str, shape: tuple[int, str, bool], arch: str
) -> Binary:
    head_dim, kind, aligned = shape
    args = arguments(config, dtype, head_dim, kind, aligned=aligned)
    out = meta(tuple(args.q.shape), dtype, aligned=aligned)
    lse = meta(tuple(args.q.shape[:3]), "float32")
    workspace = {name: meta(*like) for name, like in _workspace(stored, args).items()}
    return binary(launches(args, out, lse, workspace)[kernel], arch)


SUPPORT = family.SUPPORT
CONFIGS = (
    Config(block_m=16, block_n=64, num_warps=4, num_stages=2, options=(("split", 4),)),
    Config(block_m=16, block_n=64, num_warps=8, num_stages=2, options=(("split", 16),)),
    Config(block_m=16, block_n=32, num_warps=2, num_stages=3, options=(("split", 1),)),
)


def _variant(name: str, stored: str, support: Support) -> Variant:
    return Variant(
        name=name,
        family="triton",
        forward=partial(forward, support),
        configs=CONFIGS[:1],
        further_configs=lambda: CONFIGS,
        support=support,
        numerics=Numerics(
            products=Products(operands="input", accumulator="float32"),
            softmax=Softmax(
                scores="float32",
                exp="ex2.approx",
                maximum=Maximum(key_order="whole_first", parts=None),
                row_sum=RowSum(apart=True),
            ),
            output=Output(probability="input", split_keys="input" if stored == "input" else True),
        ),
        # NaN at a key that a row of the tile sees reaches, as 0 * NaN in P V, the other rows.
        contract=Contract(masked_values="finite", batch_invariant=True),
        workspace=partial(_workspace, stored),
        builds=partial(builds, stored),
        head_dim_buckets=BUCKETS,
    )


VARIANTS = [
    _variant("triton-decode-forward", "float32", SUPPORT),
    _variant(
        "triton-decode-forward-16bit", "input", replace(SUPPORT, dtypes=("float16", "bfloat16"))
    ),
]

WITNESS = (
    {
        "case": (
            "triton-decode-forward:m16n64w4s2-split_4:accuracy:b=2,hq=7,sq=33,skv=49,d=82,dv=141,"
            "dtype=bfloat16,lq=bhsd.p1.o4.xb,lk=bhsd.p1.xh,lv=bhsd.o1,lo=sbhd.p4,ldo=bshd.p4.o8,"
            "dist=one_hot_v,seed=149"
        ),
        "tensor": "out",
        "r": 0.929,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
    {
        "case": (
            "triton-decode-forward:m16n64w4s2-split_4:accuracy:b=2,hq=7,sq=33,skv=49,d=82,dv=141,"
            "dtype=bfloat16,lq=bhsd.p1.o4.xb,lk=bhsd.p1.xh,lv=bhsd.o1,lo=sbhd.p4,ldo=bshd.p4.o8,"
            "dist=one_hot_v,seed=149"
        ),
        "tensor": "out",
        "r": 0.927,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
    {
        "case": (
            "triton-decode-forward-16bit:m16n64w4s2-split_4:accuracy:hq=3,sq=15,skv=99,d=146,"
            "dtype=bfloat16,dist=one_hot_v,seed=59"
        ),
        "tensor": "out",
        "r": 0.774,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
    {
        "case": (
            "triton-decode-forward-16bit:m16n64w4s2-split_4:accuracy:hq=3,sq=15,skv=99,d=146,"
            "dtype=bfloat16,dist=one_hot_v,seed=59"
        ),
        "tensor": "out",
        "r": 0.771,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
)
