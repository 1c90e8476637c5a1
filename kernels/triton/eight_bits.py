"""What the Triton forwards of 8-bit inputs share: the factors of q, k and v, the step of the
running softmax, and an O of 8 bits.

Factors come per tensor and per batch and key head, or per block of ROWS successive rows: of a query
head for q, of a key head for k and v (`references.quantisation.ByBlock`).  In order, each product
with one rounding:

    factor = scale_log2 dq dk                       of the tile, or of its rows and a block of keys
    x      = factor (q . k)
    acc    = alpha acc + round(256 p) v             one factor of v: O = acc / l (dv / 256)
    acc    = alpha acc + (dv / 256) round(256 p) v  a factor for each block of rows: O = acc / l

A block of keys has one factor, since ROWS is a multiple of BLOCK_N: `given_factors` refuses
another.  A tile of rows can have several, which are read by row.  V's factor enters after P was
rounded and the matrix unit has added up the block: P keeps its range, and the sum in the unit needs
no factor.

The 8-bit matrix units of sm_89 and sm_90 keep 13 fraction bits of a sum.  On sm_90
`max_num_imprecise_acc=32` has Triton start each wgmma (32 products) at zero and add its result to
an accumulator in fp32; with 0 it would widen the operands to fp16, as it does wherever wgmma does
not fit (tiles of 32 rows).  On sm_89 Triton ignores that argument and chains, so operands are
widened there (WIDEN).  On sm_100 and sm_120 it ignores it too, and need not heed it: their units
keep 25 bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import Blocks, steps
from kernels.triton.compile import meta
from kernels.triton.online_softmax import weighed
from kernels.triton.tiles import head_of, plain
from references.quantisation import parse_quantisation
from verify.variant import AttentionArgs, Config, Descales

BUCKETS = (32, 64, 128, 256)  # an 8-bit product is 32 deep
PROMOTION = 32
# The largest finite numbers of the 8-bit formats of O.
LARGEST_OUT = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@triton.jit
def saturated(x, largest: tl.constexpr):
    """x between -largest and largest, which the cast to 8 bits need not see to; NaN stays NaN."""
    return tl.clamp(x, -largest, largest, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _descale(factors, NUMBER: tl.constexpr, batch, head):
    """The factor of a head in that tensor of q, k and v; factors: the tensors and their strides."""
    return tl.load(head_of(factors[0][NUMBER], factors[1][NUMBER], batch, head, False))


@triton.jit
def _descales(factors, NUMBER: tl.constexpr, batch, head, block):
    """The factors of these blocks of rows of a head in that tensor of q, k and v."""
    blocks = head_of(factors[0][NUMBER], factors[1][NUMBER], batch, head, False)
    return tl.load(blocks + block * plain(factors[1][NUMBER][2], False))


@triton.jit
def tile_factors(factors, scale_log2, batch, heads, row, ROWS: tl.constexpr):
    """What multiplies the products q . k of a tile, as far as no block of keys decides it, and what
    multiplies acc / l.

    heads: the query head, and its key head.
    """
    head, head_kv = heads
    factor = scale_log2
    factor_v = 0.00390625  # 1 / 256
    if ROWS:
        factor = (factor * _descales(factors, 0, batch, head, row // ROWS))[:, None]
        factor_v = 1.0
    elif factors[0] is not None:
        factor = factor * _descale(factors, 0, batch, head_kv)
        factor = factor * _descale(factors, 1, batch, head_kv)
        factor_v = factor_v * _descale(factors, 2, batch, head_kv)
    return factor, factor_v


@triton.jit
def block_scores(product, factor, factors, batch, head_kv, begin, ROWS: tl.constexpr):
    """The scores of a block of keys, which begins at key `begin`, from its products q . k."""
    if ROWS:
        factor = factor * _descales(factors, 1, batch, head_kv, begin // ROWS)
    return product * factor


@triton.jit
def stepped_8(  # noqa: PLR0917
    x,  # scores (rows, keys), in base 2 and in fp32
    v_tile,  # (keys, dims), in 8 bits
    m,
    l,  # noqa: E741 - the paper's name
    acc,
    factors,
    place,  # the batch, the key head and the block's first key
    WIDEN: tl.constexpr,  # multiply in fp16
    IMPRECISE: tl.constexpr,  # products that a 13-bit accumulator may add up; None: a block's
    ROWS: tl.constexpr,
):
    """m, l and acc after a block of keys."""
    m, l, p, alpha = weighed(x, m, l)  # noqa: E741
    acc = acc * alpha[:, None]
    p_tile = (p * 256.0).to(v_tile.dtype)
    if WIDEN:
        p_tile = p_tile.to(tl.float16)
        v_tile = v_tile.to(tl.float16)
    if ROWS:
        batch, head_kv, begin = place
        factor_v = 0.00390625 * _descales(factors, 2, batch, head_kv, begin // ROWS)
        acc += tl.dot(p_tile, v_tile, max_num_imprecise_acc=IMPRECISE) * factor_v
    elif IMPRECISE is None:
        acc += tl.dot(p_tile, v_tile)
    else:
        acc = tl.dot(p_tile, v_tile, acc, max_num_imprecise_acc=IMPRECISE)
    return m, l, acc


def given_factors(args: AttentionArgs, block_n: int) -> tuple[tuple[Any, Any], int]:
    """The factors of q, k and v with their strides (None and None if there are none), and how many
    successive rows share one; 0: all of a head.

    Raises ValueError where a block of block_n keys would have several.
    """
    if args.descales is None:
        return (None, None), 0
    rows = parse_quantisation(args.descaling).keys
    if rows % block_n:
        raise ValueError(f"config: blocks of {block_n} keys, of which {rows} share a factor")
    given = args.descales.q, args.descales.k, args.descales.v
    return (given, steps(*given, aligned=False)), rows


def effective_blocks(config: Config, bucket: int, aligned: bool = True) -> Blocks:
    """The blocks launched for a config, which must name all four; block_n, the keys per rescale, is
    always the config's.  `bucket` is that of the larger head dim.

    A config is launched as declared where the tensors are aligned, up to bucket 128.  Elsewhere it
    would spill, and 32 rows or fewer also keep to mma.sync on Hopper: see
    `family.effective_blocks`.
    """
    declared = Blocks.declared(config)
    if aligned and bucket <= 128:
        return declared
    rows = 32 if aligned or bucket <= 128 else 16
    return Blocks(rows, declared.block_n, num_warps=8, num_stages=2)


def output_scale(args: AttentionArgs, out: Tensor) -> float | None:
    """The factor of an 8-bit O; None if O has 16 bits."""
    return args.output_scale if out.dtype in LARGEST_OUT else None


def keywords(out: Tensor, promotion: int | str, rows: int, *, widen: bool) -> dict[str, Any]:
    """Keywords of a launch.

    promotion: as `Products.promotion`: 32, or "block".  rows: how many share a factor.  widen:
    multiply in fp16, where an 8-bit product cannot be promoted (sm_89).
    """
    return {
        "WIDEN": widen,
        "IMPRECISE": None if promotion == "block" else promotion,
        "ROWS": rows,
        "LARGEST_OUT": LARGEST_OUT.get(out.dtype),
    }


def widens(q: Tensor) -> bool:
    """Whether the device of q multiplies in fp16."""
    return q.is_cuda and torch.cuda.get_device_capability(q.device) == (8, 9)


def meta_descales(args: AttentionArgs, word: str) -> Descales:
    """Factors without memory of a quantisation, for arguments without memory."""
    shapes = {name: tuple(getattr(args, name).shape) for name in "qkv"}
    buffers = parse_quantisation(word).buffers(shapes)
    return Descales(*(meta(buffers[f"descale_{name}"], "float32") for name in "qkv"), word)
