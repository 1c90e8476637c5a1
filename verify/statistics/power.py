"""The smallest fault of each class that a passing case would have convicted; docs/power.md derives
the closed forms.

A strength is computed from what the judge already holds when it judges a case: reference, bound,
the kernel's own error, and the rows whose weights `verify.statistics.forward` has read.  Of each
row of a tensor only the element with the largest exact value is asked: any element that is asked is
a proof, and the largest ones are near the best.  Nothing here changes a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from references.row_blocks import RowBlock, row_blocks
from verify.arithmetic.dtypes import DType, dtype_named
from verify.judging.compared import noted
from verify.judging.comparison import first_largest
from verify.judging.launch import Launch
from verify.judging.stacked import joined, together
from verify.judging.trial import Trial
from verify.judging.truth import Truth
from verify.problem import Problem
from verify.statistics.block_rows import BlockRows, of_block, positions_of, results_of

# (absolute, relative) tolerances of other projects' rules: of Triton's attention tutorial, and the
# defaults of torch.testing.assert_close by dtype.
TUTORIAL = (1e-2, 0.0)
CLOSE = {"float16": (1e-5, 1e-3), "bfloat16": (1e-5, 1.6e-2), "float32": (1e-5, 1.3e-6)}

_NOTE = "power"
_ROWS = 16  # of a block that statistics have read, at least one of each head
_COLUMNS = 4  # of a row, where a lost key is looked for
_ALONE = 2.0**-20  # a row whose other keys weigh less has no O without its heaviest


class Largest(NamedTuple):
    """The element of each row whose exact value is the largest: that value, its bound, what the
    kernel wrote; (rows), fp64."""

    want: Tensor
    bound: Tensor
    got: Tensor

    @staticmethod
    def of(want: Tensor, bound: Tensor, got: Tensor) -> Largest:
        at = first_largest(want.abs())
        return Largest(*(x.gather(-1, at).flatten().double() for x in (want, bound, got)))


@dataclass(frozen=True)
class _Strengths:
    """What the results of a case show without its weights, of that launch and truth; those of O
    and, if there is an LSE, those of the LSE.  weights: what the rows show whose weights were read
    together with others'; None: they are to be read.  live: some row sees a key."""

    run: Launch
    truth: Truth
    out: Mapping[str, float]
    lse: Mapping[str, float] | None
    weights: Mapping[str, float] | None = None
    live: bool = True


def forward_power(trial: Trial, error: Tensor, read: Sequence[RowBlock]) -> dict[str, float]:
    """The strengths that the trial's first run certifies, `power_CLASS`, and what other rules need,
    `tutorial_CLASS` and `close_CLASS`; a class without a finite strength has none.  None is derived
    for an O in 8 bits.

    The run must have passed.  error: |O - reference|, 0 in rows without a key; read: the rows that
    statistics have read, or none.
    """
    p, run, truth = trial.problem, trial.first, trial.truth
    if run.out is None or p.scaled_output is not None:
        return {}
    with trial.clock.timed("power"):
        own = noted(trial, _NOTE, _Strengths, truth)
        if not (bool((~truth.empty).any()) if own is None else own.live):
            return {}
        own = own or _strengths([trial], [error])[0]
        found = dict(own.out)
        weights = [own.weights]
        if own.weights is None:
            known = results_of(trial)
            weights = [_of_scores(of_block(trial, x, known))[0] for x in read or _rows(trial)]
        for strengths in (*weights, own.lse):
            for name, e in (strengths or {}).items():
                found[name] = min(found.get(name, math.inf), e)
    return finite(found)


def certify_together(stack: Sequence[Trial], errors: Sequence[Tensor]) -> None:
    """Compute the strengths of cases of one shape and kernel together, and give each its part.
    errors: as `forward_power` gets them."""
    if stack[0].problem.scaled_output is not None:
        return
    for trial, own in zip(stack, _strengths(stack, errors), strict=True):
        trial.notes[_NOTE] = own


def certify_rows(stack: Sequence[Trial], rows: BlockRows) -> None:
    """The same of what follows from the weights of rows that were read together."""
    for trial, own in zip(stack, _of_scores(rows), strict=True):
        known = noted(trial, _NOTE, _Strengths, trial.truth)
        if known is not None:
            trial.notes[_NOTE] = replace(known, weights=own)


def _strengths(stack: Sequence[Trial], errors: Sequence[Tensor]) -> list[_Strengths]:
    p, cases = stack[0].problem, len(stack)
    whole = joined([trial.truth for trial in stack])
    error, out = (together(x) for x in (errors, [t.first.outputs["out"] for t in stack]))
    live = (~whole.empty).flatten()
    some_live = live.reshape(cases, -1).any(1).tolist()
    largest = Largest.of(whole.out, whole.out_bound, out)
    margin = margin_of(largest.want, largest.bound, p.format_out).masked_fill_(~live, torch.inf)
    error_out = largest.got - largest.want
    found = {"power_out": smallest_of(error_out, margin, largest.got, cases)}
    found |= of_factors(p.dtype_out, "out", largest.want, cases)
    # What every element of a row stays within, whichever of them is off
    most = torch.add(whole.out_bound, error).amax(-1).flatten()
    margin = margin_of(largest.want, most, p.format_out)
    size = torch.linalg.vector_norm(out, dim=-1, dtype=torch.float64).flatten()
    needed = margin.mul_(math.sqrt(p.head_dim_v)).div_(size).nan_to_num_(nan=torch.inf)
    of_rows = needed.masked_fill_(~live, -torch.inf).reshape(cases, -1)
    found["power_element"] = of_rows.amax(1)
    of_lse: Sequence[Mapping[str, float] | None] = [None] * cases
    if stack[0].first.lse is not None:
        natural = stack[0].natural_lse(together([t.first.outputs["lse"] for t in stack]))
        of_lse = _of_lse(p, whole, natural, cases)
    return [
        _Strengths(trial.first, trial.truth, own, lse, live=some)
        for trial, own, lse, some in zip(stack, told(found), of_lse, some_live, strict=True)
    ]


def told(found: Mapping[str, Tensor]) -> list[dict[str, float]]:
    """Numbers of cases, (cases) by name, as those of each case."""
    rows = torch.stack(list(found.values()), 1).tolist()
    return [dict(zip(found, row, strict=True)) for row in rows]


def _rows(trial: Trial) -> list[RowBlock]:
    """The rows that statistics would have read if they predicted this arithmetic."""
    rows = positions_of(trial.problem)
    return (
        list(row_blocks(*trial.expanded, trial.problem.attention, rows=rows)) if len(rows) else []
    )


def _of_lse(p: Problem, truth: Truth, got: Tensor, cases: int) -> list[dict[str, float]]:
    """The classes whose response is a function of the LSE, from all rows of each of so many cases;
    got: natural."""
    error, margin = _lse_error(got, truth.lse, truth.lse_bound)
    found = {"power_lse": smallest_of(error, margin, torch.ones_like(margin), cases)}
    if p.score_mod is None:
        keys = torch.tensor(p.kv_lengths() * cases, dtype=torch.float64)[:, None, None]
        e = smallest_of(error, margin, _least_response(truth.lse, keys), cases)
        found["power_scale"] = torch.where(e <= 1, e, torch.inf)
    return told(found)


def _least_response(lse: Tensor, keys: Tensor) -> Tensor:
    """What LSE changes by at least, per unit of e, if all scores are multiplied by 1 + e, |e| <= 1;
    with the sign of the change under e > 0.  keys: at least as many as the row sees."""
    above = (lse - keys.clamp(min=1.0).log()).clamp_(min=0.0)
    return torch.where(lse < 0, lse, above)


def _lse_error(got: Tensor, want: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Error and margin of LSE; 0 and inf in rows without a key."""
    live = want != -torch.inf
    error = torch.where(live, got - want, 0.0)
    margin = margin_of(want, bound, dtype_named("float32"), places=2)
    return error, torch.where(live, margin, torch.inf)


def _of_scores(of: BlockRows) -> list[dict[str, float]]:
    """The classes whose response needs scores and weights, from some rows of each case."""
    p, block, cases = of.problem, of.block, of.cases
    own, known = of.sampled(_ROWS)
    hidden = ~block.visible[:, own]
    scores = block.scores[:, own].masked_fill(hidden, 0.0)
    weighted = block.probabilities[:, own] * scores
    mean, top = weighted.sum(-1), block.row_max[:, own]
    live = top != -torch.inf
    low = scores.masked_fill(hidden, torch.inf).amin(-1)
    curve = torch.where(live, (top - low).square_().div_(8), torch.inf)
    found: dict[str, Tensor] = {}
    lse = known.get("got_lse")
    if lse is not None:
        error, margin = _lse_error(lse, known["lse"], known["lse_bound"])
        below = torch.where(live, mean - top, 0.0)
        found["power_exponent"] = smallest_of(error, margin, below, cases, curve)
        found["power_key"] = _lightest(block.probabilities[:, own], margin + error.abs(), cases)
        if p.score_mod is None:
            found["power_scale"] = smallest_of(error, margin, mean, cases, curve)
    out = known["out"]
    bound = torch.where(live[..., None], known["out_bound"], torch.inf)
    of_out = bound, margin_of(out, bound, p.format_out)
    if lse is None:
        found["power_key"] = _lost_from_out(of, out, sum(of_out, torch.zeros(())))
    if p.score_mod is None:
        response = torch.bmm(weighted, block.values).sub_(out * mean[..., None]).abs_()
        found |= _rules(p.dtype_out, "scale", out, response, cases)
        if lse is None:
            spread = block.values.amax(1, keepdim=True) - block.values.amin(1, keepdim=True)
            bound, margin = of_out
            curve = curve[..., None] * spread
            found["power_scale"] = smallest_of(bound, margin, response, cases, curve)
    return told(found)


def _lost_from_out(of: BlockRows, out: Tensor, limit: Tensor) -> Tensor:
    """The strength of a lost key that O alone shows, (cases): without a key of weight P, O changes
    by P / (1 - P) (O - V).  limit: what a change must exceed, (heads, rows, head_dim_v)."""
    own, _ = of.sampled(_ROWS)
    p, values = of.block.probabilities[:, own], of.block.values
    rest = 1 - p
    alone = rest < _ALONE
    share = p / rest.clamp(min=_ALONE)
    heard = torch.zeros_like(p, dtype=torch.bool)
    for column in columns(limit):
        at = column[:, None, :].expand(-1, values.shape[1], -1)
        v = values.gather(-1, at).mT
        want, least = (x.gather(-1, column[..., None]) for x in (out, limit))
        heard |= share * (want - v).abs() > least
    return lightest_of_each(p, heard & ~alone, of.cases)


def _lightest(probabilities: Tensor, limit: Tensor, cases: int) -> Tensor:
    """The smallest weight of a key without which the LSE of its row, lower by -ln(1 - P), is more
    than `limit` off, (cases); probabilities: 0 at hidden keys."""
    least = -torch.expm1(-limit)[..., None]
    # a row of one key has no LSE without it
    heard = (probabilities > least) & (probabilities <= 0.5)
    lost = torch.where(heard, probabilities, torch.inf)
    return lost.reshape(cases, -1).amin(1) if lost.numel() else lost.new_full((cases,), math.inf)


def columns(limit: Tensor) -> Iterator[Tensor]:
    """The _COLUMNS last-dimension indices of each row at which the limit is least, one (..., rows)
    tensor each."""
    count = min(_COLUMNS, limit.shape[-1])
    yield from limit.topk(count, -1, largest=False).indices.unbind(-1)


def lightest_of_all(weights: Tensor, heard: Tensor) -> float:
    """The smallest e such that, whatever the weight from e on, some row hears the loss of its
    heaviest key of at most that weight; inf if there is none.

    weights: (..., keys), 0 at hidden keys; heard: whether the loss of each is beyond the limit.
    """
    return float(lightest_of_each(weights, heard, 1)[0])


def lightest_of_each(weights: Tensor, heard: Tensor, cases: int) -> Tensor:
    """`lightest_of_all` of each of so many cases that are stacked along the first dimension,
    (cases)."""
    keys = weights.shape[-1]
    if not weights.numel():
        return weights.new_full((cases,), math.inf)
    weights, heard = (x.reshape(cases, -1, keys) for x in (weights, heard))
    # of equal weights the silent one first: either may be the one that is lost
    silent_first = heard.long().argsort(dim=-1, stable=True)
    order = weights.gather(-1, silent_first).sort(dim=-1, descending=True, stable=True)
    told = heard.gather(-1, silent_first).gather(-1, order.indices)
    told = (told & (order.values > 0)).long()
    # From the heaviest key down: a row's state changes where e falls below a weight.
    after = torch.cat([told[..., 1:], torch.zeros_like(told[..., :1])], -1)
    falling = order.values.flatten(1).sort(-1, descending=True)
    hearing = told[..., 0].sum(1, keepdim=True)
    changes = (after - told).flatten(1).gather(1, falling.indices)
    below = torch.cat([falling.values[:, 1:], falling.values.new_full((cases, 1), -1.0)], 1)
    silent = (hearing + changes.cumsum(1) == 0) & (below < falling.values)
    first = falling.values.gather(1, silent.long().argmax(1, keepdim=True))
    found = torch.where(silent.any(1, keepdim=True), first, 0.0)
    return torch.where(hearing == 0, torch.inf, found)[:, 0]


def margin_of(want: Tensor, bound: Tensor, output: DType, places: int = 1) -> Tensor:
    """What an error must exceed: the bound, and `places` units in the last place, for the cast may
    round the faulty value the other way.  inf where an infinity may be accepted."""
    reach = want.abs().add_(bound, alpha=2.0)
    beyond = ~(reach < output.overflow)
    # a unit in the last place at x is 2 u |x| at most, or the smallest subnormal
    place = reach.mul_(2 * places * output.unit_roundoff).add_(places * output.smallest_subnormal)
    return place.add_(bound).masked_fill_(beyond, torch.inf)


def smallest_of(
    error: Tensor, margin: Tensor, response: Tensor, cases: int, curve: Tensor | None = None
) -> Tensor:
    """The smallest e of each of so many cases that are stacked along the batch, (cases), such that
    a fault of strength e, of either sign, leaves some element beyond its margin.

    error: the element's own; response: what it changes by per unit of e, to first order; curve: at
    most this times e^2 is the rest.  The best element counts for each sign, and the worse sign.
    """
    if not error.numel():
        return error.new_full((cases,), math.inf, dtype=torch.float64)
    signed = torch.copysign(error, error * response)
    size = response.abs()
    need = torch.stack([margin - signed, margin + signed])  # of a fault of either sign
    if curve is None:
        e = need.div_(size)
    else:
        root = size.square() - 4 * curve * need
        e = torch.where(root >= 0, 2 * need / (size + root.clamp(min=0.0).sqrt()), torch.inf)
    return e.nan_to_num(nan=torch.inf).reshape(2, cases, -1).amin(2).amax(0)


def of_factors(dtype: str, name: str, want: Tensor, cases: int) -> dict[str, Tensor]:
    """The strength at which other rules hear that a tensor is multiplied by 1 + e, (cases): its
    largest element needs the least.  want: (elements), cases one after the other."""
    most = want.abs().reshape(cases, -1).amax(1)
    return {key: strength(pair, most, most) for key, pair in _pairs(dtype, name).items()}


def _rules(dtype: str, name: str, want: Tensor, response: Tensor, cases: int) -> dict[str, Tensor]:
    """The strength at which a comparison with absolute and relative tolerances hears such a fault
    in an otherwise exact kernel, (cases)."""
    size = response.abs()
    if not response.numel():
        return {}
    found = {}
    for key, pair in _pairs(dtype, name).items():
        # The largest response needs the least, if the tolerance is the same everywhere.
        found[key] = strength(pair, want, size).reshape(cases, -1).amin(1)
    return found


def _pairs(dtype: str, name: str) -> dict[str, tuple[float, float]]:
    """The tolerances of each rule that there is in that dtype, by the name of its strength."""
    rules = {f"tutorial_{name}": TUTORIAL}
    if dtype in CLOSE:
        rules[f"close_{name}"] = CLOSE[dtype]
    return rules


def strength(pair: tuple[float, float], want: Tensor, response: Tensor) -> Tensor:
    """What each element needs under absolute and relative tolerances; response: not negative."""
    absolute, relative = pair
    if not relative:
        return absolute / response
    return (relative * want.abs()).add_(absolute).div_(response)


def finite(found: dict[str, float]) -> dict[str, float]:
    """The strengths that say something: finite ones, and of certificates those up to 1."""
    return {
        name: value
        for name, value in found.items()
        if math.isfinite(value) and not (name.startswith("power_") and value > 1)
    }
