"""Predicted errors of O and LSE, row by row; docs/statistics.md derives them.  Names follow
`verify.tolerance.forward`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from references.positions import Sizes
from references.row_blocks import RowBlock, row_blocks
from verify.arithmetic.dtypes import dtype_named
from verify.arithmetic.instructions import LOG_ERROR
from verify.judging.compared import noted
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.judging.truth import Truth
from verify.problem import Problem
from verify.statistics.block_rows import BlockRows, positions_of
from verify.statistics.rows import (
    UNIFORM,
    WALK,
    Prediction,
    drift,
    drifts,
    exponent_steps,
    half_place,
    joined,
    shuffled_sums,
    summaries,
    summary,
)
from verify.tolerance.arithmetic import ForwardArithmetic, U, relative
from verify.tolerance.forward_maxima import rescaling_blocks
from verify.tolerance.resolution import resolve
from verify.tolerance.score_errors import product_error
from verify.tolerance.score_mods import mod_errors

_NOTE = "statistics"
_KEYS = 8  # visible ones
_EFFECTIVE = 4.0  # 1 / sum P^2
# relative spread of a row's P, in units of u_P, from which on their roundings are unrelated
_COHERENT = 16.0
_SMALL = 0.1  # relative error of weights up to which the first order is enough


@dataclass(frozen=True)
class _Weights:
    """Errors of a block's weights, relative.  (heads, rows, keys), unless said."""

    # bound of what a key's value may decide: the matrix unit, the factor of the scores, its own
    # exponential
    common: Tensor
    # standard deviation of what sums of Q K^T to nearest round, of its own in every key
    sums: Tensor
    # standard deviation of what fp32 rounds on the way from a score to its exponential, and of the
    # rescales behind a key's block
    steps: Tensor
    # standard deviation of what Q and K lost to a prescale, the same in every key's share of a
    # feature
    operands: Tensor
    scores: Tensor  # standard deviation of what each score lost to its own format
    rounding: Tensor  # standard deviation of P's rounding, absolute, as a part of the row sum
    least: Tensor  # a lower bound of it


@dataclass(frozen=True)
class _Measured:
    """The statistics of a case, of that launch and truth."""

    run: Launch
    truth: Truth
    measures: Mapping[str, float]


def forward_measures(trial: Trial, read: list[RowBlock] | None = None) -> dict[str, float]:
    """Sufficient statistics of some rows of O and LSE of a trial's first run; none where no row is
    suited.  read: the blocks of these rows are appended to it, unless they were computed together
    with others'."""
    p, run, truth = trial.problem, trial.first, trial.truth
    known = noted(trial, _NOTE, _Measured, truth)
    if known is not None:
        return dict(known.measures)
    rows = positions_of(p)
    if not len(rows) or run.out is None:
        return {}
    arithmetic = resolve(trial.declaration.numerics, trial.config, p, trial.arch)
    if underived(arithmetic) is not None:
        return {}
    conversion = arithmetic.conversion
    if conversion is not None:
        least = Sizes.of(trial.expanded[2].flatten(), 0).least
        if bool((least < conversion.normal).any()):
            return {}  # V loses what is not predicted
    with trial.clock.timed("statistics"):
        parts = predictions(p, trial.expanded, arithmetic, rows, read)
        found = summary(
            "out", run.out.flatten(0, 1)[:, rows], truth.out.flatten(0, 1)[:, rows], parts[0]
        )
        if run.lse is not None:
            got = trial.natural_lse(run.lse).flatten(0, 1)[:, rows, None]
            found |= summary("lse", got, truth.lse.flatten(0, 1)[:, rows, None], parts[1])
    return found


def measure_together(stack: Sequence[Trial], rows: BlockRows) -> None:
    """Compute the statistics of cases whose rows were read together, and give each its part, if
    nothing but its shape decides whether it has any."""
    first = stack[0]
    a = resolve(first.declaration.numerics, first.config, first.problem, first.arch)
    # The order of whole blocks and others depends on where all rows of a tile are.
    if a.conversion is not None or (a.rescales_by_one and a.key_order == "whole_first"):
        return
    found: list[dict[str, float]] = [{} for _ in stack]
    if underived(a) is None:
        parts = _predicted(rows.problem, rows.block, a)
        known, cases = rows.known, rows.cases
        found = summaries("out", known["got_out"], known["out"], parts[0], cases)
        if "got_lse" in known:
            got, want = known["got_lse"][..., None], known["lse"][..., None]
            of_lse = summaries("lse", got, want, parts[1], cases)
            found = [one | other for one, other in zip(found, of_lse, strict=True)]
    for trial, own in zip(stack, found, strict=True):
        trial.notes[_NOTE] = _Measured(trial.first, trial.truth, own)


def underived(a: ForwardArithmetic) -> str | None:
    """Why errors of an arithmetic are not predicted, or None."""
    if a.row_sum != "unrounded":
        return f"row_sum: {a.row_sum}: P's roundings are in LSE, and in O twice"
    if not a.exponential.uniform or not a.rescale.uniform:
        return "exp: errors that grow with the argument"
    if a.integers is not None:
        return "quantised: what Q and K lose has a sign in all scores of a row or key"
    if a.leads:
        return "maximum: how large P is when it is rounded is not known"
    if a.conversion is not None and a.conversion.roundoff:
        return "values: V's roundings are in every row"
    if any(unit.accumulator != "float32" for unit in (a.scores, a.values)):
        return "accumulator: sums are rounded to 16 bits on the way"
    return None


def predictions(
    problem: Problem,
    inputs: tuple[Tensor, Tensor, Tensor],
    arithmetic: ForwardArithmetic,
    rows: Tensor,
    read: list[RowBlock] | None = None,
) -> tuple[Prediction, Prediction]:
    """Of O, (batch * heads_q, rows, head_dim_v), and of the natural LSE, (batch * heads_q, rows,
    1).

    inputs: q, k and v at their full logical shapes, descales applied; rows: positions in seqlen_q;
    read: the blocks are appended to it.
    """
    found = []
    for block in row_blocks(*inputs, problem.attention, rows=rows):
        if read is not None:
            read.append(block)
        found.append((block.index, *_predicted(problem, block, arithmetic)))
    shape = (problem.batch * problem.heads_q, len(rows))
    return joined(shape, [(i, o) for i, o, _ in found]), joined(
        shape, [(i, lse) for i, _, lse in found]
    )


def _predicted(
    problem: Problem, block: RowBlock, a: ForwardArithmetic
) -> tuple[Prediction, Prediction]:
    """Of the rows of a block of all keys."""
    keys = block.keys_of_heads.repeat_interleave(problem.group, 0)
    walk = abs(problem.scale) * torch.bmm(
        block.queries.square(), keys.square().mT
    ).sqrt_().masked_fill_(~block.visible, 0.0)
    weights = _weights(problem, block, a, walk)
    suited = _suited(block, a, weights)
    return (
        _out(problem, block, a, weights, suited),
        _lse(problem, block, a, weights, suited, walk),
    )


def _weights(problem: Problem, block: RowBlock, a: ForwardArithmetic, walk: Tensor) -> _Weights:
    """walk: the root of the sum of squares of a score's products, scaled."""
    hidden, p = ~block.visible, block.probabilities
    size = block.scaled.abs().masked_fill(hidden, 0.0)
    top = block.row_max.abs().nan_to_num(posinf=0.0)[..., None]
    mod = mod_errors(problem, a)
    roundings = 1 + mod.count("score") + mod.count("result") if mod else 0
    common = drift(a.scores, problem.head_dim) * (size + WALK * walk)
    # What all keys of a row share, its row sum divides out again: of the factor it is the mean
    # score.
    apart = size
    if mod:
        common += a.function * block.scores.abs().masked_fill_(hidden, 0.0)
    else:
        scaled = block.scaled.masked_fill(hidden, 0.0)
        apart = (scaled - (p * scaled).sum(-1, keepdim=True)).abs_()
    common += (U * a.scale_roundings) * apart
    common += a.exps - a.rescales
    of_sums = shuffled_sums(a.scores, float(problem.head_dim), size, walk.square()).sqrt_()
    steps = exponent_steps(size, top + a.offset, roundings) + _rescales(a)
    scale, sums = (1.0 if a.normalised else block.row_sum[..., None].clamp(min=1.0)), p
    worst = (UNIFORM * a.probability_roundoff) * p
    least = worst / 2
    if a.probability_roundoff and (a.normalised or a.blocks == 1) and not a.by_lse:
        # The number that is rounded is known, and so is the place of its last digit.
        sums = p * scale
        worst = least = (half_place(sums, a.probability) * UNIFORM / scale).masked_fill(p == 0, 0.0)
    floor = 0.0 if a.probability_roundoff == 0 else a.flush
    return _Weights(
        common=common.masked_fill_(hidden, 0.0),
        sums=of_sums.masked_fill_(hidden, 0.0),
        steps=steps.sqrt_().masked_fill_(hidden, 0.0),
        operands=(a.operand_roundings * UNIFORM) * walk,
        scores=torch.zeros_like(p)
        if a.score_format is None
        else (2**0.5 * UNIFORM * a.score_format.unit_roundoff) * size,
        rounding=torch.maximum(
            worst, torch.minimum(p, UNIFORM * floor / (scale * torch.ones_like(p)))
        ),
        least=least,
    )


def _rescales(a: ForwardArithmetic) -> float:
    """The variance of what rescales make of keys in different blocks: a block has 0 to n - 1 behind
    it, whichever its keys are, and each may be off by as much, with one sign."""
    if a.ones:
        return 0.0
    return math.log1p(-a.rescale.error) ** 2 * (a.blocks**2 - 1) / 12


def _suited(block: RowBlock, a: ForwardArithmetic, w: _Weights) -> Tensor:
    """Rows (heads, rows) of keys enough whose weights differ enough, and whose errors are small
    enough."""
    p, keys = block.probabilities, block.visible.sum(-1)
    squares = p.square().sum(-1)
    differ = keys * squares - 1 >= (_COHERENT * a.probability_roundoff) ** 2
    largest = (p * (w.common + w.operands + w.scores + w.sums + w.steps)).sum(-1)
    return (
        (keys >= _KEYS)
        & (squares * _EFFECTIVE <= 1)
        & differ
        & (largest <= _SMALL)
        & block.lse.isfinite()
    )


def _out(
    problem: Problem, block: RowBlock, a: ForwardArithmetic, w: _Weights, suited: Tensor
) -> Prediction:
    p, values, size = block.probabilities, block.values, block.out.abs()
    keys = block.visible.sum(-1, keepdim=True, dtype=torch.float64)
    parts = (w.common, w.operands, w.scores, w.sums, w.steps)
    moved = p.square() * torch.stack([x.square() for x in parts]).sum(0)
    stacked = torch.cat([w.rounding.square(), w.least.square(), p.square(), moved], 1)
    rounded, least, walk, spread = torch.bmm(stacked, values.square()).chunk(4, 1)
    # The heaviest P is 1 where it is the row's maximum, and then is exact.
    index = p.argmax(-1, keepdim=True)
    heads = torch.arange(len(p), device=p.device)[:, None]
    top = (w.least.gather(-1, index) * values[heads, index[..., 0]]).square()
    least = (least - top).clamp(min=0.0)
    moved_out = spread - block.out * (
        2 * torch.bmm(moved, values) - block.out * moved.sum(-1, keepdim=True)
    )
    # Partial sums of P V are a random walk about their trend; truncation takes its part of each of
    # them.  Where P rounds to a grid, it does not quite lose what it gains: P f(P) falls off with
    # P, whatever its density f.
    reach = size + WALK * walk.sqrt()
    allowance = drifts(a.values, problem.seqlen_kv, keys) * reach
    allowance += (U * (a.division + a.output_roundings) + a.probability_roundoff**2 / 2) * size
    if a.merged or a.by_lse:
        lse = block.lse.abs().nan_to_num(posinf=0.0)[..., None]
        logs = torch.log(keys.clamp(min=1.0))
        allowance += (
            U * ((11 + a.scale_roundings) * lse + 12 * logs) + 2 * LOG_ERROR * (1 + logs)
        ) * reach
        # an exponential that is off by as much everywhere, which no row sum divides out again
        allowance += a.exps * size
    if a.probability.itemsize == 1:
        # Small P become 0 or a single place, which the row sum keeps.
        scale = 1.0 if a.normalised else block.row_sum[..., None].clamp(min=1.0)
        lost = torch.where(p * scale < 4 * a.flush, p, 0.0).clamp(max=a.flush).sum(-1, keepdim=True)
        allowance += lost * values.abs().amax(1, keepdim=True)
    known = (half_place(size, a.output) * UNIFORM).square()
    of_weights = rounded + moved_out.clamp(min=0.0)
    variance = of_weights + (keys + 3 * a.blocks) * (U * UNIFORM * size).square()
    variance += shuffled_sums(a.values, keys, size, walk)
    reach = size + variance.sqrt() + allowance
    sigma = (variance + (half_place(reach, a.output) * UNIFORM).square()).sqrt()
    return Prediction(
        sigma, allowance, known + least, least / (known + least), of_weights, suited, walk > 0
    )


def _lse(
    problem: Problem,
    block: RowBlock,
    a: ForwardArithmetic,
    w: _Weights,
    suited: Tensor,
    walk: Tensor,
) -> Prediction:
    """No rounding of P enters the row sum: but for a prescale and narrow scores, everything is of
    the size of fp32's.

    The allowance is only what can have one sign in every row: truncation, the errors of functions,
    and factors that are rounded once for all.  walk: as in `_weights`.
    """
    p = block.probabilities
    keys = block.visible.sum(-1, keepdim=True, dtype=torch.float64)
    lse, top = (x.abs().nan_to_num(posinf=0.0)[..., None] for x in (block.lse, block.row_max))
    log = torch.log(block.row_sum.clamp(min=1.0))[..., None] + a.offset
    scaled = block.scaled.masked_fill(~block.visible, 0.0)
    size = scaled.abs()
    mod = mod_errors(problem, a)
    rounded = 4 + (mod.count("score") + mod.count("result") if mod else 0)
    cut = drift(a.scores, problem.head_dim) * (size.square() + walk.square()).sqrt_()
    last = (half_place(lse, dtype_named("float32")) * UNIFORM).square()
    variance = (p * w.operands.square()).sum(-1, keepdim=True)
    variance += (p.square() * (w.scores.square() + w.sums.square() + cut.square())).sum(
        -1, keepdim=True
    )
    each = (p * (size + top + a.offset)).square().sum(-1, keepdim=True)
    variance += (U * UNIFORM) ** 2 * (
        rounded**2 * each + keys + a.blocks + 4 * (top.square() + lse.square() + log.square())
    )
    allowance = (p * cut).sum(-1, keepdim=True)
    allowance += _factors(a, (p * (size if mod else scaled)).sum(-1, keepdim=True), lse, top)
    if mod:
        scores = block.scores.abs().masked_fill(~block.visible, 0.0)
        allowance += a.function * (p * scores).sum(-1, keepdim=True)
    allowance += _functions(problem, block, a, log)
    return Prediction(
        sigma=variance.sqrt(),
        allowance=allowance,
        least=last,
        share=torch.zeros_like(last),
        of_weights=torch.zeros_like(last),
        suited=suited,
        judged=lse.isfinite(),
    )


def _factors(a: ForwardArithmetic, mean: Tensor, lse: Tensor, top: Tensor) -> Tensor:
    """What constants that are rounded once may move every LSE by: the factor of the scores, whose
    mean under P is given, those of a change of base, and another factor of the maximum."""
    factor = U * a.scale_roundings * mean.abs()
    if a.log2_sum:
        return factor + 0.05 * U * lse  # that of ln 2
    return factor + U * ((1 + a.merged) * lse + (1 + a.scale_roundings) * top)


def _functions(
    problem: Problem, block: RowBlock, a: ForwardArithmetic, log: Tensor
) -> Tensor | float:
    """The largest errors of exponentials and logarithms, which may have one sign everywhere."""
    key, rescale = (-math.log1p(-f.error) for f in (a.exponential, a.rescale))
    changes: Tensor | float = float(a.blocks)
    plain = problem.score_mod is None and a.score_format is None and not a.merged
    if a.rescales_by_one and plain:
        error = product_error(a, problem) * block.magnitude.amax(-1, keepdim=True)
        error += relative(a.scale_roundings + 1, U) * block.row_max.abs()[..., None]
        found = rescaling_blocks(block, a, problem, error.nan_to_num(posinf=0.0))
        changes = changes if found is None else found
    logarithm = LOG_ERROR * (log.clamp(min=math.log(2)) if a.log2_sum else 1 + log)
    return key + (changes - 1 + a.merged) * rescale + (1 + a.merged) * logarithm
