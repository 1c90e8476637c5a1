"""FlashAttention-2 forwards through block pointers, with their LSE in base 2, in Triton: one of
16-bit inputs, and one of 8-bit inputs with factors.

The algorithm, its roundings, masks, walk over the keys and builds are those of `flash_forward`.  A
tile is loaded through `tl.make_block_ptr`, which describes a head as a matrix of so many rows and
columns, and puts 0 in the place of what lies outside.  K is described as its transpose, so that a
block of it enters Q K^T as it is.  V and K end, for a tile, at the last key that one of its rows
sees: what lies behind it is not read.

The LSE is stored as the scores are kept, in base 2, as Triton's public tutorial stores it:

    LSE = m + log2 l = log2 sum 2^x,    x = (softmax_scale log2 e) (q . k)

`triton-block-pointer-fp8-forward` takes e4m3 and e5m2 as `fp8_forward` does: its factors, its
roundings, and its output in bfloat16, float16, e4m3 or e5m2.  The scores, and so the LSE, have the
factors of q and k.

Block pointers are deprecated from Triton 3.7 on, and gone in 3.9: there the variant says that it is
not available.
"""

import re
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.masks import mask_build, mask_tables
from kernels.triton import eight_bits, family, fp8_forward
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
from kernels.triton.eight_bits import (
    PROMOTION,
    block_scores,
    given_factors,
    keywords,
    meta_descales,
    output_scale,
    saturated,
    stepped_8,
    tile_factors,
    widens,
)
from kernels.triton.online_softmax import finished, masked, started, stepped
from kernels.triton.tiles import (
    block_at,
    blocks_of,
    head_of,
    key_walk,
    own_tile,
    plain,
    plain_dims,
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


def _block_pointer_forward(  # noqa: PLR0912, PLR0915, PLR0917
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
    WIDEN: tl.constexpr,  # multiply 8-bit tiles in fp16
    IMPRECISE: tl.constexpr,  # products that a 13-bit accumulator may add up; None: of 16 bits
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

    # Rows past the end have the bounds of the last one, so that they do not widen the tile's.
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.minimum(rows, seqlen_q - 1)
    sizes = seqlen_q, seqlen_kv, diagonal_low, diagonal_high
    low, high = seen_keys(row, tables, batch, sizes, KIND)
    _first, last, walk = key_walk(low, high, seqlen_kv, BLOCK_N)

    q_block = tl.make_block_ptr(
        head_of(q, steps[0], batch, head, ALIGNED),
        shape=(seqlen_q, head_dim),
        strides=(plain(steps[0][2], ALIGNED), 1),
        offsets=(tile * BLOCK_M, 0),
        block_shape=(BLOCK_M, BLOCK_D),
        order=(1, 0),
    )
    k_block = tl.make_block_ptr(
        head_of(k, steps[1], batch, head_kv, ALIGNED),
        shape=(head_dim, last),
        strides=(1, plain(steps[1][2], ALIGNED)),
        offsets=(0, 0),
        block_shape=(BLOCK_D, BLOCK_N),
        order=(0, 1),
    )
    v_block = tl.make_block_ptr(
        head_of(v, steps[2], batch, head_kv, ALIGNED),
        shape=(last, head_dim_v),
        strides=(plain(steps[2][2], ALIGNED), 1),
        offsets=(0, 0),
        block_shape=(BLOCK_N, BLOCK_DV),
        order=(1, 0),
    )
    o_block = tl.make_block_ptr(
        head_of(out, steps[3], batch, head, ALIGNED),
        shape=(seqlen_q, head_dim_v),
        strides=(plain(steps[3][2], ALIGNED), 1),
        offsets=(tile * BLOCK_M, 0),
        block_shape=(BLOCK_M, BLOCK_DV),
        order=(1, 0),
    )

    EIGHT: tl.constexpr = IMPRECISE is not None
    if EIGHT:
        heads = head, head_kv
        factor, factor_v = tile_factors(factors, scale_log2, batch, heads, row, ROWS)
    else:
        factor = scale_log2
    q_tile = tl.load(q_block, boundary_check=(0, 1), padding_option="zero")
    if WIDEN:
        q_tile = q_tile.to(tl.float16)
    m, l, acc = started(BLOCK_M, BLOCK_DV)  # noqa: E741 - the paper's name
    for EDGE in tl.static_range(2):
        for i in range(blocks_of(walk, EDGE)):
            begin = block_at(walk, i, EDGE) * BLOCK_N
            k_here = tl.advance(k_block, (0, begin))
            v_here = tl.advance(v_block, (begin, 0))
            if EDGE == 0:  # all keys lie inside
                k_tile = tl.load(k_here, boundary_check=(0,), padding_option="zero")
                v_tile = tl.load(v_here, boundary_check=(1,), padding_option="zero")
            else:
                k_tile = tl.load(k_here, boundary_check=(0, 1), padding_option="zero")
                v_tile = tl.load(v_here, boundary_check=(0, 1), padding_option="zero")
            if WIDEN:
                k_tile = k_tile.to(tl.float16)
            if EIGHT:
                x = tl.dot(q_tile, k_tile, max_num_imprecise_acc=IMPRECISE)
                x = block_scores(x, factor, factors, batch, head_kv, begin, ROWS)
            else:
                x = tl.dot(q_tile, k_tile, input_precision="ieee") * factor
            if EDGE == 1:
                x = masked(x, begin + tl.arange(0, BLOCK_N), low, high)
            if EIGHT:
                place = batch, head_kv, begin
                m, l, acc = stepped_8(  # noqa: E741
                    x, v_tile, m, l, acc, factors, place, WIDEN, IMPRECISE, ROWS
                )
            else:
                m, l, acc = stepped(x, v_tile, m, l, acc)  # noqa: E741

    o_tile, lse_rows = finished(m, l, acc)
    if EIGHT:
        o_tile = o_tile * factor_v
    if output_scale is not None:
        o_tile = saturated(o_tile * output_scale, LARGEST_OUT)
    tl.store(o_block, o_tile.to(out.dtype.element_ty), boundary_check=(0, 1))
    tl.store(lse + (batch * heads_q + head) * seqlen_q + rows, lse_rows, mask=rows < seqlen_q)


aligned, general = twice(_block_pointer_forward)


def launch(args: AttentionArgs, out: Tensor, lse: Tensor | None, *, widen: bool = False) -> Launch:
    """How the kernel is launched for these arguments; raises `Unsupported` outside the support of
    the inputs' dtype.

    widen: multiply 8-bit inputs in fp16, where an 8-bit product cannot be promoted (sm_89).
    """
    eight = args.q.dtype.itemsize == 1
    (FP8_SUPPORT if eight else SUPPORT).check(args, out)
    mask = mask_build(args)
    bucket = head_dim_bucket(max(args.head_dim, args.head_dim_v))
    fast = is_aligned(args, out)
    if eight:
        bucket = max(bucket, eight_bits.BUCKETS[0])
        blocks = eight_bits.effective_blocks(args.config, bucket, fast)
    else:
        blocks = family.effective_blocks(args.config, args.dtype, bucket, fast)
    factors, shared = given_factors(args, blocks.block_n)
    return Launch(
        aligned if fast else general,
        args.batch * args.heads_q * triton.cdiv(args.seqlen_q, blocks.block_m),
        (
            *(args.q, args.k, args.v, out, lse, mask_tables(args, mask), factors),
            steps(args.q, args.k, args.v, out, aligned=fast),
            head_dims(args, aligned=fast),
            *counts(args, args.heads_q, mask),
            args.softmax_scale * LOG2_E,
            output_scale(args, out),
        ),
        {
            **blocks.keywords(mask.kind, bucket, fast),
            **keywords(out, PROMOTION if eight else "block", shared, widen=widen),
        },
    )


def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
    """Write O to `out` and the base-2 LSE to `lse`; raises `Unsupported` outside SUPPORT."""
    SUPPORT.check(args, out)
    with torch.cuda.device_of(args.q), _deprecated():
        launch(args, out, lse).run()


def forward_8(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
    """`forward` of 8-bit inputs; raises `Unsupported` outside FP8_SUPPORT."""
    FP8_SUPPORT.check(args, out)
    with torch.cuda.device_of(args.q), _deprecated():
        launch(args, out, lse, widen=widens(args.q)).run()


def _deprecated() -> warnings.catch_warnings:
    """Triton 3.7 and 3.8 warn of block pointers whenever a kernel that has them is built."""
    return warnings.catch_warnings(action="ignore", category=Warning)


def unavailable() -> str | None:
    """Why this Triton cannot run the kernel, or None."""
    version = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
    if version >= (3, 9):
        return f"Triton {triton.__version__} has no block pointers: they were removed in 3.9"
    return None


def builds(eight: bool, arch: str) -> list[Build]:
    """The dtypes of 8 or of 16 bits at several head dims, so that each kind of mask occurs, and
    builds for unaligned rows; of 8 bits also kinds of factors, from sm_89 on."""
    if eight and arch in ("sm_80", "sm_86"):
        return []
    found = []
    for number, dtype, *shape in _FP8_BUILDS if eight else _BUILDS:
        config = CONFIGS[number]
        head_dim, kind, aligned, *others = shape
        name = f"{config.name}, {dtype}, d {head_dim}, {kind}{'' if aligned else ', unaligned'}"
        name += "".join(f", {other}" for other in others if other)
        compile_ = partial(_compile, config, dtype, tuple(shape), arch)
        budget = SPILL_BUDGETS.get(name, {}).get(arch, 0)
        found.append(Build(name, compile_, budget, expected(dtype, aligned=aligned)))
    return found


# Bytes per thread: the most of Triton 3.6 and 3.7.
SPILL_BUDGETS: dict[str, dict[str, int]] = {
    "m128n32w8s2, float8_e4m3fn, d 64, causal, tensor": {"sm_89": 8},
    "m64n32w4s3, float8_e5m2, d 64, window, block128": {"sm_120a": 8},
}

_BUILDS = (
    (0, "float16", 64, "full", True),
    (1, "bfloat16", 128, "causal", True),
    (2, "float16", 128, "interval", True),
    (3, "bfloat16", 64, "window", True),
    (4, "float16", 64, "causal", True),
    (0, "bfloat16", 256, "full", True),
    (3, "float16", 72, "causal", False),
)
# With the kind of factors.
_FP8_BUILDS = (
    (0, "float8_e4m3fn", 64, "full", True, ""),
    (1, "float8_e5m2", 128, "causal", True, "head"),
    (2, "float8_e4m3fn", 128, "interval", True, "block64"),
    (3, "float8_e5m2", 64, "window", True, "block128"),
    (4, "float8_e4m3fn", 64, "causal", True, "tensor"),
    (0, "float8_e4m3fn", 256, "full", True, "head"),
    (3, "float8_e4m3fn", 72, "causal", False, "head"),
    (0, "float8_e5m2", 72, "full", False, "block64"),
)


def _compile(config: Config, dtype: str, shape: tuple[Any, ...], arch: str) -> Binary:
    head_dim, kind, aligned, *words = shape
    args = arguments(config, dtype, head_dim, kind, aligned=aligned)
    factors = [meta_descales(args, word) for word in words if word]
    args = replace(args, descales=next(iter(factors), None))
    eight = args.q.dtype.itemsize == 1
    out = meta(tuple(args.q.shape), "bfloat16" if eight else dtype, aligned=aligned)
    lse = meta(tuple(args.q.shape[:3]), "float32")
    with _deprecated():
        return binary(launch(args, out, lse, widen=eight and arch == "sm_89"), arch)


SUPPORT = replace(family.SUPPORT, dtypes=("float16", "bfloat16"))
FP8_SUPPORT = replace(fp8_forward.SUPPORT, dtypes=("float8_e4m3fn", "float8_e5m2"))
# Every pair of two values of block_m, block_n and num_stages, but for 64 keys in 3 stages, which
# outgrow the 99 KiB of shared memory of sm_86, 89 and 120.
CONFIGS = (
    Config(block_m=64, block_n=64, num_warps=4, num_stages=2),
    Config(block_m=128, block_n=64, num_warps=8, num_stages=2),
    Config(block_m=128, block_n=32, num_warps=8, num_stages=3),
    Config(block_m=64, block_n=32, num_warps=4, num_stages=3),
    Config(block_m=128, block_n=32, num_warps=8, num_stages=2),
)

VARIANT = Variant(
    name="triton-block-pointer-forward",
    family="triton",
    forward=forward,
    configs=CONFIGS[:1],
    further_configs=lambda: CONFIGS,
    support=SUPPORT,
    numerics=family.NUMERICS,
    # NaN at a key that a row of the tile sees reaches, as 0 * NaN in P V, the other rows.
    # Keys in front of the first one that a tile sees are loaded.
    contract=replace(family.CONTRACT, lse="base2", masked_values="finite"),
    available=unavailable,
    compilable=unavailable,
    builds=partial(builds, False),
    head_dim_buckets=BUCKETS,
)
FP8_VARIANT = replace(
    VARIANT,
    name="triton-block-pointer-fp8-forward",
    forward=forward_8,
    support=FP8_SUPPORT,
    numerics=fp8_forward.VARIANT.numerics,
    builds=partial(builds, True),
    head_dim_buckets=eight_bits.BUCKETS,
)
VARIANTS = [VARIANT, FP8_VARIANT]

WITNESS = (
    {
        "case": (
            "triton-block-pointer-forward:m64n64w4s2:accuracy:hq=6,hkv=2,sq=15,skv=265,d=146,"
            "dtype=bfloat16,dist=one_hot_v,seed=59"
        ),
        "tensor": "out",
        "r": 0.898,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
    {
        "case": (
            "triton-block-pointer-forward:m64n64w4s2:accuracy:hq=6,hkv=2,sq=15,skv=265,d=146,"
            "dtype=bfloat16,dist=one_hot_v,seed=59"
        ),
        "tensor": "out",
        "r": 0.892,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
)
