"""Scores whose Q and K the kernel rounds to 8-bit integers, by factors of its own: how far each may
stray.

The derivation is docs/tolerance-quantised.md; names follow it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from references.positions import LOADED, Choice, slices
from references.row_blocks import RowBlock
from verify.arithmetic.dtypes import DTYPES, DType, dtype_named
from verify.arithmetic.unit import Unit
from verify.problem import Problem
from verify.tolerance.arithmetic import FP32_MAX, TINY, Columns, Integers, U, relative
from verify.variant import Numerics, Quantised
from verify.variant.numerics import leaves

MOST_HEAD_DIM = 2**17  # 127^2 times that is the largest sum that int32 holds
_LARGEST = 127
_QUOTIENT = 5  # roundings of a factor, of x / factor and of a sum of that and a half
# Half a step, and what those roundings move a quotient of 127 by.
_HALF = 0.5 + (_LARGEST + 1) * relative(_QUOTIENT, U)
# Below it a factor, or one over it, may leave fp32's normal range.
TINY_ROW = 2.0**-100
_LN_2 = math.log(2)


# What is derived beside integers, whatever it holds; of all other fields, their defaults alone.
_BESIDE_INTEGERS = (
    *("products.instruction", "products.accumulator", "products.score_accumulator"),
    "products.promotion",
    *("softmax.exp", "softmax.rescale_exp", "softmax.scale_roundings", "softmax.softcap_tanh"),
    *("softmax.block_n", "softmax.row_sum.of", "softmax.row_sum.lanes", "softmax.row_sum.apart"),
    *("output.probability", "output.values", "output.normalised", "output.division"),
    "output.roundings",
)


_UNQUANTISED = Quantised()


def check_declared(numerics: Numerics, problem: Problem) -> None:
    """Raise ValueError for what no bound is derived for beside integers that the kernel makes."""
    declared = numerics.quantised
    if declared == _UNQUANTISED:
        return
    defaults = leaves(Numerics())
    if declared.products == "none":
        for path in leaves(declared):
            if getattr(declared, path) != getattr(Quantised(), path):
                raise ValueError(
                    f"numerics.quantised.{path}: nothing is quantised: products='none'"
                )
        return
    for path, value in leaves(numerics).items():
        if path.startswith("quantised.") or path in _BESIDE_INTEGERS:
            continue
        if value != defaults[path]:
            raise ValueError(
                f"numerics.{path}: no bound is derived for {value!r} beside"
                f" numerics.quantised.products = {declared.products!r}"
            )
    of_values = declared.value_top, declared.probability_top
    probability = DTYPES.get(numerics.output.probability)
    limit = probability.max if probability is not None and probability.itemsize == 1 else 0.0
    if any(of_values) and not all(0 < top <= limit for top in of_values):
        raise ValueError(
            f"numerics.quantised.value_top, probability_top: {of_values} are not both above 0 and"
            f" at most {limit:g}, the largest P in {numerics.output.probability}"
        )
    for path, plain in (("products.accumulator", "float32"), ("output.normalised", False)):
        if any(of_values) and leaves(numerics)[path] != plain:
            raise ValueError(
                f"numerics.{path}: no bound is derived for {leaves(numerics)[path]!r} beside"
                " numerics.quantised.value_top"
            )
    if dtype_named(problem.dtype).itemsize == 1 or problem.head_dim > MOST_HEAD_DIM:
        raise ValueError(
            f"numerics.quantised.products: no bound is derived for {problem.dtype} inputs with"
            f" head_dim {problem.head_dim}, only for 16 or 32 bits and at most {MOST_HEAD_DIM}"
        )


def columns_of(declared: Quantised, probability: DType) -> Columns | None:
    """How V is rounded to 8 bits; None where it is not.  probability: the format of P."""
    return Columns(declared.value_top, probability) if declared.value_top else None


def integers_of(declared: Quantised, tiles: tuple[int, int], problem: Problem) -> Integers | None:
    """How Q and K become integers; None where they do not.  tiles: rows of Q and of K, as declared
    or configured; 0: all."""
    if declared.products == "none":
        return None
    given = problem.dtype if declared.centred == "input" else declared.centred
    unit = min(abs(problem.scale), 1.0) if declared.query_scaled else 1.0
    return Integers(
        query_tile=tiles[0],
        key_tile=tiles[1],
        query_floor=declared.floor / (unit or 1.0),
        key_floor=declared.floor,
        query_unit=unit,
        kept=None if declared.centred == "none" else dtype_named(given),
    )


@dataclass(frozen=True, eq=False)
class Steps:
    """What integers stand for, as far as it can be known of any grouping: fp64, of all heads.

    queries: the largest factor that a row of Q can have, (batch * heads_q, chosen rows).  keys: of
    a row of K less the mean, (batch * heads_kv, seqlen_kv).  mean: of K along the keys, and off:
    how far the kernel's can be from that, both (batch * heads_kv, head_dim).  spoiled: heads of
    queries, (batch * heads_q,), in which nothing is known of any score; None: nowhere.
    """

    queries: Tensor
    keys: Tensor
    mean: Tensor
    off: Tensor
    spoiled: Tensor
    tiny: Tensor

    @staticmethod
    def of(problem: Problem, q: Tensor, k: Tensor, a: Integers, rows: Choice = None) -> Steps:
        """q, k: at their full logical shapes.  rows: positions in seqlen_q; None: all."""
        largest = _largest(q.flatten(0, 1))
        queries = _by_tile(largest, a.query_tile)
        keys_of_heads = k.flatten(0, 1)
        mean, off = _mean(keys_of_heads, a)
        own = _apart(keys_of_heads, mean, off, a)
        spoiled = _spoiled(keys_of_heads, own, a).repeat_interleave(problem.group, 0)
        tiny = _tiny(largest * a.query_unit, a.query_floor)
        if rows is not None:
            queries, tiny = queries[:, rows], tiny[:, rows]
        keys = _factor(_by_tile(own, a.key_tile), a.key_floor)
        return Steps(_factor(queries, a.query_floor), keys, mean, off, spoiled, tiny)


def _largest(x: Tensor) -> Tensor:
    """Of the sizes along the last dimension, fp64."""
    return x.abs().amax(-1).double().nan_to_num_(nan=0.0, posinf=0.0)


def _apart(keys: Tensor, mean: Tensor, off: Tensor, a: Integers) -> Tensor:
    """The largest element of each key less the mean, as rounded, at most, (heads, keys)."""
    if a.kept is None:
        return _largest(keys)
    found = keys.new_zeros(keys.shape[:2], dtype=torch.float64)
    step = max(LOADED[keys.device.type] * keys.shape[1] // max(keys.numel(), 1), 1)
    for part in slices(keys.shape[1], step):
        apart = keys[:, part].double().sub_(mean[:, None]).abs_().add_(off[:, None])
        found[:, part] = apart.amax(-1)
    rounded = found * (1 + a.kept.unit_roundoff) + (a.kept.smallest_subnormal / 2 + TINY)
    return torch.where(found > 0, rounded, 0.0)


def _by_tile(largest: Tensor, size: int) -> Tensor:
    """The largest of each tile of so many rows, (heads, rows), in each of its rows; 0: of all."""
    rows = largest.shape[-1]
    if not rows or size == 1:
        return largest
    tile = min(size, rows) if size else rows
    padded = torch.nn.functional.pad(largest, (0, -rows % tile))
    tops: Tensor = padded.view(len(padded), -1, tile).amax(-1)
    return tops.repeat_interleave(tile, -1)[..., :rows]


def _factor(largest: Tensor, floor: float) -> Tensor:
    """The largest factor of rows with that largest |x|."""
    return largest / _LARGEST * (1 + relative(_QUOTIENT, U)) + floor * (1 + relative(2, U))


def _tiny(largest: Tensor, floor: float) -> Tensor:
    """Rows whose own factor, or one over it, may leave fp32's normal range."""
    return (largest > 0) & (largest < TINY_ROW) & (floor == 0)


def _mean(keys: Tensor, a: Integers) -> tuple[Tensor, Tensor]:
    """The mean of K along the keys, (heads, head_dim), and how far a kernel's may be from it."""
    heads, count, _ = keys.shape
    if a.kept is None or not count:
        nothing = keys.new_zeros(heads, keys.shape[-1], dtype=torch.float64)
        return nothing, nothing
    mean = keys.sum(1, dtype=torch.float64) / count
    size = keys.abs().sum(1, dtype=torch.float64) / count
    summed = relative(count + 1, U) * size
    rounded = a.kept.unit_roundoff * (mean.abs() + summed) + a.kept.smallest_subnormal / 2
    return mean, torch.where(size > 0, summed + rounded + TINY, 0.0)


def _spoiled(keys: Tensor, own: Tensor, a: Integers) -> Tensor:
    """Key heads with a row whose factor, or one over it, may leave fp32's range, or whose mean or
    distance from that may overflow."""
    tiny = _tiny(own, a.key_floor).any(-1)
    if a.kept is None:
        return tiny
    sums = keys.abs().sum(1, dtype=torch.float64)
    beyond = (sums >= FP32_MAX).any(-1) | (own >= a.kept.overflow).any(-1)
    return tiny | beyond


@dataclass(frozen=True, eq=False)
class ScoreErrors:
    """Of a block's scaled scores less what the row has in common.

    error: how far each may stray, before the roundings of the scale, (heads, rows, keys).  shift:
    bound on the size of what the mean takes from each score of the row; shift_error: how far the
    LSE may stray by what it gets back; beyond: rows that are not judged, in O and LSE and in the
    latter alone; all (heads, rows, 1).
    """

    error: Tensor
    shift: Tensor
    shift_error: Tensor
    beyond: Tensor
    lse_beyond: Tensor


def score_errors(
    block: RowBlock, a: Integers, unit: Unit, problem: Problem, steps: Steps
) -> ScoreErrors:
    """unit: that multiplies Q and the mean, which LSE gets back."""
    heads, rows = block.index
    of_keys = torch.arange(heads.start, heads.stop, device=block.scores.device) // problem.group
    scale, queries = abs(problem.scale), block.queries.abs()
    by_query = steps.queries[heads, rows][..., None]
    by_key = steps.keys[of_keys][:, block.keys]
    mean, off = steps.mean[of_keys], steps.off[of_keys]

    keys = (block.keys_of_heads[block.key_heads] - mean[:, None]).abs_().add_(off[:, None])
    moved = torch.zeros_like(keys)
    if a.kept is not None:
        moved = torch.where(keys > 0, _rounded(keys, a.kept) + TINY, 0.0)
    of_key = _of_integers(keys + moved, by_key[..., None]) + moved
    of_query = _of_integers(queries, by_query)
    error = torch.bmm(of_query, (keys + of_key).mT)
    error += torch.bmm(queries, of_key.mT)
    error *= scale * (1 + 2.0**-40)  # what fp64 makes of such sums

    largest = by_key.amax(-1)[:, None, None] if by_key.shape[-1] else by_query.new_zeros(1, 1, 1)
    # What a product of factors, the scale and the sum is no larger than, in any order.
    most = (_LARGEST**2 * problem.head_dim) * max(scale / _LN_2, 1.0)
    grown = most * by_query.clamp(min=1.0) * largest.clamp(min=1.0)
    error = error + TINY * 4 * grown * (queries.amax(-1, keepdim=True) > 0)

    around, slack = mean.abs(), (queries @ off[..., None])
    exact = (block.queries @ mean[..., None]).abs()
    sizes = queries @ around[..., None] + slack
    shift = scale * (exact + slack)
    beyond = (grown >= FP32_MAX) | steps.spoiled[heads][:, None, None]
    beyond = beyond | steps.tiny[heads, rows][..., None]
    if a.kept is None:
        none = torch.zeros_like(shift)
        return ScoreErrors(error, none, none, beyond, torch.zeros_like(beyond))
    summed = max(unit.kappa(problem.head_dim), relative(problem.head_dim + 1, U)) * sizes
    product = summed + _rounded(exact + slack + summed, a.kept)
    shift_error = scale * product + relative(4, U) * (shift + scale * product) + 4 * TINY
    lse_beyond = sizes * (1 + 2.0**-6) >= a.kept.overflow
    return ScoreErrors(error, shift, shift_error, beyond, lse_beyond)


def _rounded(size: Tensor, dtype: DType) -> Tensor:
    """What rounding to nearest moves numbers of that size by, at most."""
    return size * dtype.unit_roundoff + dtype.smallest_subnormal / 2


def _of_integers(size: Tensor, factor: Tensor) -> Tensor:
    """How far integers times their factor may be from numbers of that size: half a step, or all of
    one that becomes 0; and the roundings of the factor and of the quotient."""
    fp32 = relative(2 * _QUOTIENT, U)
    return torch.minimum(factor * _HALF, size) * (1 + fp32) + size * fp32
