"""Kept scores: a function without a declaration that rounds neither operands nor scores in a launch
is judged without that freedom.

A plain function is judged by the weakest honest arithmetic: q, k and the scores may be rounded to
the inputs' 16-bit dtype. Most functions keep their scores in fp32. This oracle compares O and LSE
with the sharper bounds of the same arithmetic without these roundings. An element beyond them has
three explanations: these roundings, further roundings behind the scores, or a fault.

A second launch tells whether scores are rounded. It has the shapes, dtype, memory, mask and scale
of the judged launch, and other values: all scores of a row are near 1400 and differ by 0.5 at most,
sums of products whose magnitudes add up to 4096. There each rounding of q, k or scores, scaled or
not, to nearest or truncated, moves O by at least twice the sharper bound, which the oracle computes
for these values and this mask. Errors in proportion to the differences of scores, such as those of
a wrong scale, move it by much less. If O of the second launch is within the sharper bounds, the
launch rounds no scores. What the other roundings can cost is added to the bounds: the exponents, P
once more, the row sum, and sums of P V twice. An element of O beyond that is wrong. The judged
launch is repeated after the second one, and must be wrong again.

In all other cases no kernel is convicted. The case is recorded as `rounded` if the second launch
is beyond the sharper bounds too. It is `undecided` if no launch can tell (a head dim below 11, a
score mod, rows of few keys, an extreme scale, a scale that is exact except for subnormal numbers),
if LSE alone is beyond, or if further roundings explain the error. A report marks the function as
unexplained if a case of a dtype is undecided and none shows that scores are rounded; `--strict`
makes this a failure.

The derivation assumes that shapes, dtype, memory, mask and scale decide how a launch computes, and
not the values of q, k and v.

Premises: scores are products of q and k times the scale (linear_scores, position_free_scores,
factors_by_head), and O is an average of V (visible_mass_only, rows_average_values).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from references.premises import Premise
from references.row_blocks import row_blocks
from verify.arithmetic.dtypes import dtype_named
from verify.judging.comparison import Comparison, compare, excess
from verify.judging.findings import Ruling
from verify.judging.kept_scores import Telling, keeping, later_roundings
from verify.judging.measuring import SpoiledError, checked, result
from verify.judging.trial import Trial
from verify.judging.truth import Truth, compute_truth
from verify.oracles import Oracle
from verify.tolerance.forward import ForwardArithmetic, resolve
from verify.variant import Declaration

NAME = "kept_scores"
WITHIN = "within"  # no element is beyond the sharper bounds
ROUNDED = "rounded"  # some is, and the second launch shows a rounding, or an error that looks so
UNDECIDED = "undecided"  # some is, and no second launch can tell
_ROWS = 16
_ELEMENTS = 1 << 24  # of the largest tensor of `_later`


def judge(trial: Trial) -> Ruling:
    """Convict the function if O of the judged launch is beyond the sharper bounds and what later
    roundings can add, before and after a launch of the same kind that keeps the sharper bounds."""
    arithmetic = _arithmetic(trial)
    truth = trial.truth_of(arithmetic)
    # outside the declared arithmetic, nothing is sharper
    truth.out_bound.masked_fill_(trial.truth.out_bound == torch.inf, torch.inf)
    got = result(trial.first)
    if not _compared(trial, got, trial.truth).worst <= 1:
        return Ruling()  # oracle `bound` convicts it
    out = _compared(trial, got, truth)
    measures = {"sharper_out": out.worst}
    worst = out.worst
    if trial.first.lse is not None:
        measures["sharper_lse"] = _of_lse(trial, trial.first.lse, truth)
        worst = max(worst, measures["sharper_lse"])
    if worst <= 1:
        return Ruling(measures=measures, observed={"scores": WITHIN})
    telling = Telling.of(trial.problem)
    if telling is None or not telling.exact_for(*trial.expanded[:2]):
        return Ruling(measures=measures, observed={"scores": UNDECIDED})
    second = checked(trial, trial.run("telling", inputs=telling.inputs))
    keeps, certain = _keeps(trial, telling, result(second), arithmetic)
    if not keeps:
        return Ruling(measures=measures, observed={"scores": ROUNDED})
    observed = {"scores": UNDECIDED}
    if not certain or out.worst <= 1:
        return Ruling(measures=measures, observed=observed)
    wide = replace(truth, out_bound=truth.out_bound + _later(trial, out.ratio))
    again = checked(trial, trial.run("after telling", inputs=trial.inputs))
    finding = None
    for launch in (again, trial.first):
        got = result(launch)
        compared = _compared(trial, got, wide)
        finding = excess(NAME, "out", got, wide.out, wide.out_bound, compared)
        if finding is None:
            return Ruling(measures=measures, observed=observed)
    assert finding is not None
    message = f"{finding.message}; a launch of the same kind rounds no scores"
    return Ruling(replace(finding, message=message), measures)


def _rule(trial: Trial) -> Ruling:
    try:
        return judge(trial)
    except SpoiledError as spoiled:
        return spoiled.ruling


def _compared(trial: Trial, got: Tensor, truth: Truth) -> Comparison:
    """Errors and r of O; 0 in rows without a key."""
    found = compare(got, truth.out, truth.out_bound, trial.problem.format_out)
    return found.among(~truth.empty[..., None])


def _of_lse(trial: Trial, raw: Tensor, truth: Truth) -> float:
    """The largest r of LSE in rows that see a key."""
    natural, want = trial.natural_lse(raw), truth.lse.nan_to_num(neginf=0.0)
    ratio = compare(natural, want, truth.lse_bound, dtype_named("float32")).ratio
    return float(torch.where(truth.empty, 0.0, ratio).max())


def _later(trial: Trial, ratio: Tensor) -> Tensor:
    """What roundings behind the scores can add to an error of O, in the rows with the largest r;
    infinite in the others, so that memory does not grow with seqlen_q."""
    p = trial.problem
    count = max(_ELEMENTS // (max(p.seqlen_kv, 1) * p.head_dim_v), 1)
    rows = ratio.amax((0, 1, 3)).topk(min(count, p.seqlen_q)).indices.sort().values
    part = torch.zeros(*p.shape_out[:2], len(rows), p.head_dim_v, dtype=torch.float64)
    for block in row_blocks(*trial.expanded, p.attention, rows=rows):
        part.flatten(0, 1)[block.index] = later_roundings(block, p.format_out)
    found = torch.full(p.shape_out, torch.inf, dtype=torch.float64)
    found[:, :, rows] = part
    return found


def _keeps(
    trial: Trial, telling: Telling, out: Tensor, arithmetic: ForwardArithmetic
) -> tuple[bool, bool]:
    """Whether O of the second launch is within the sharper bounds in _ROWS rows of every head, and
    whether these rows would have shown every rounding."""
    p = trial.problem
    rows = torch.linspace(0, p.seqlen_q - 1, min(_ROWS, p.seqlen_q)).round().long()
    truth = compute_truth(p, telling.expanded, [arithmetic], trial.clock, rows)
    names = set(telling.roundings())
    for block in row_blocks(*telling.expanded, p.attention, rows=rows):
        want, bound = (x.flatten(0, 1)[block.index] for x in (truth.out, truth.out_bound))
        names -= telling.showing(block.visible, want, bound)
        if not names:
            break
    return _compared(trial, out[:, :, rows], truth).worst <= 1, not names


def _arithmetic(trial: Trial) -> ForwardArithmetic:
    numerics = keeping(trial.declaration.numerics, trial.problem.dtype)
    assert numerics is not None
    return resolve(numerics, trial.config, trial.problem, trial.arch)


def _declared(declaration: Declaration) -> str | None:
    return None if declaration.undeclared else "its scores are declared"


def _free(trial: Trial) -> bool:
    """Whether the declaration leaves the freedom in this dtype, and a row sees a key."""
    declared = keeping(trial.declaration.numerics, trial.problem.dtype)
    return declared is not None and not bool(trial.truth.empty.all())


ORACLE = Oracle(
    name=NAME,
    group="accuracy",
    catches=(
        "errors of a plain function that the weakest honest arithmetic would excuse: a wrong scale,"
        " lost keys, coarse exponentials"
    ),
    judge=_rule,
    excludes=_declared,
    needs=frozenset(
        {
            Premise.LINEAR_SCORES,
            Premise.POSITION_FREE_SCORES,
            Premise.FACTORS_BY_HEAD,
            Premise.VISIBLE_MASS_ONLY,
            Premise.ROWS_AVERAGE_VALUES,
        }
    ),
    concerns=_free,
    rank=24,
)
