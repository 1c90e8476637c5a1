"""The smallest fault of each class that a passing case would have convicted; docs/power.md derives
the closed forms.

A strength is computed from what the judge already holds when it judges a case: reference, bound and
the kernel's own error at every element.  Nothing here changes a verdict.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from references.row_blocks import RowBlock, row_blocks
from verify.arithmetic.dtypes import DType, dtype_named
from verify.judging.trial import Trial
from verify.statistics.rows import chosen

# (absolute, relative) tolerances of other projects' rules: of Triton's attention tutorial, and the
# defaults of torch.testing.assert_close by dtype.
TUTORIAL = (1e-2, 0.0)
CLOSE = {"float16": (1e-5, 1e-3), "bfloat16": (1e-5, 1.6e-2), "float32": (1e-5, 1.3e-6)}

_EVERY = 4  # of the rows that statistics judge, one in so many: weights cost as much as a bound


def forward_power(trial: Trial) -> dict[str, float]:
    """The strengths that the trial's first run certifies, `power_CLASS`, and what other rules need,
    `tutorial_CLASS` and `close_CLASS`; a class without a finite strength has none.

    The run must have passed.
    """
    p, run, truth = trial.problem, trial.first, trial.truth
    if run.out is None or not bool((~truth.empty).any()):
        return {}
    with trial.clock.timed("power"):
        got, live = run.out.double(), ~truth.empty
        margin = _margin(truth.out, truth.out_bound, p.format_out)
        margin = torch.where(live[..., None], margin, torch.inf)
        error = got - truth.out
        found = {"power_out": _smallest(error, margin, got)} | _rules(p.dtype_out, "out", got, got)
        size = got.square().mean(-1).sqrt()
        needed = margin.add_(error.abs_()).amax(-1)[live] / size[live]
        found["power_element"] = float(needed.nan_to_num(nan=torch.inf).max())
        found |= _of_scores(trial)
    return _finite(found)


def gradient_power(trial: Trial) -> dict[str, float]:
    """The same of a backward: `power_dq`, `power_dk` and `power_dv` of a factor 1 + e, and
    `power_read_lse` of an LSE that is read off by e, natural units."""
    truth, found = trial.gradients, {}
    read = [math.inf]
    with trial.clock.timed("power"):
        for name, raw in trial.first.outputs.items():
            got, want = raw.double(), getattr(truth, name)
            bound = getattr(truth, f"{name}_bound")
            margin = _margin(want, bound, trial.problem.format)
            found[f"power_{name}"] = _smallest(got - want, margin, got)
            found |= _rules(trial.problem.dtype, name, got, got)
            # Every weight changes, and so may every rounding: what it leaves is within the bound.
            response = (want.abs() - bound).clamp(min=0.0)
            read.append(_smallest(bound, margin, response, response / 2))
        found["power_read_lse"] = min(read)
    return _finite(found)


def _of_scores(trial: Trial) -> dict[str, float]:
    """The classes whose response needs scores and weights, from some rows."""
    p, run, truth = trial.problem, trial.first, trial.truth
    heads = p.batch * p.heads_q
    work = float(heads * p.seqlen_kv * (p.head_dim + 2 * p.head_dim_v))
    rows = chosen(p.seqlen_q, heads, work, p.seed)[::_EVERY]
    if not len(rows) or run.out is None or not p.pairs:
        return {}
    got = None if run.lse is None else trial.natural_lse(run.lse).flatten(0, 1)[:, rows]
    want = truth.lse.flatten(0, 1)[:, rows]
    lse_bound = truth.lse_bound.flatten(0, 1)[:, rows]
    out, out_bound = (x.flatten(0, 1)[:, rows] for x in (truth.out, truth.out_bound))
    classes: dict[str, list[float]] = {"scale": [], "exponent": [], "lse": [], "key": []}
    rules: dict[str, list[float]] = {}
    for block in row_blocks(*trial.expanded, p.attention, rows=rows):
        at, live = block.index, block.lse != -math.inf
        scores = block.scores.masked_fill(~block.visible, 0.0)
        mean = (block.probabilities * scores).sum(-1)
        low = block.scores.masked_fill(~block.visible, torch.inf).amin(-1)
        curve = torch.where(live, (block.row_max - low).square() / 8, torch.inf)
        if got is not None:
            limit = _margin(want[at], lse_bound[at], dtype_named("float32"), places=2)
            limit = torch.where(live, limit, torch.inf)
            error = torch.where(live, got[at] - want[at], 0.0)
            classes["lse"].append(_smallest(error, limit, torch.ones_like(limit)))
            top = torch.where(live, mean - block.row_max, 0.0)
            classes["exponent"].append(_smallest(error, limit, top, curve))
            classes["key"].append(_lightest(block, limit + error.abs()))
            if p.score_mod is None:
                classes["scale"].append(_smallest(error, limit, mean, curve))
        if p.score_mod is None:
            response = _weighted(block, scores) - mean[..., None] * block.out
            spread = block.values.amax(1, keepdim=True) - block.values.amin(1, keepdim=True)
            bound = torch.where(live[..., None], out_bound[at], torch.inf)
            limit = _margin(out[at], bound, p.format_out)
            bend = curve[..., None] * spread
            classes["scale"].append(_smallest(bound, limit, response.abs(), bend))
            for name, value in _rules(p.dtype_out, "scale", out[at], response).items():
                rules.setdefault(name, []).append(value)
    found = {f"power_{name}": min(values) for name, values in classes.items() if values}
    return found | {name: min(values) for name, values in rules.items()}


def _weighted(block: RowBlock, scores: Tensor) -> Tensor:
    """The sums of P S V, (heads, rows, head_dim_v)."""
    return torch.bmm(block.probabilities * scores, block.values)


def _lightest(block: RowBlock, limit: Tensor) -> float:
    """The smallest weight of a visible key without which the LSE of its row, lower by -ln(1 - P),
    is more than `limit` off."""
    least = -torch.expm1(-limit)[..., None]
    p = block.probabilities.masked_fill(~block.visible, torch.inf)
    # a row of one key has no LSE without it
    lost = p.masked_fill((p <= least) | (p > 0.5), torch.inf)
    return float(lost.min()) if lost.numel() else math.inf


def _margin(want: Tensor, bound: Tensor, output: DType, places: int = 1) -> Tensor:
    """What an error must exceed: the bound, and `places` units in the last place, for the cast may
    round the faulty value the other way.  inf where an infinity may be accepted."""
    reach = want.abs().add_(bound, alpha=2.0)
    beyond = ~(reach < output.overflow)
    # a unit in the last place at x is 2 u |x| at most, or the smallest subnormal
    place = reach.mul_(2 * places * output.unit_roundoff).add_(places * output.smallest_subnormal)
    return place.add_(bound).masked_fill_(beyond, torch.inf)


def _smallest(
    error: Tensor, margin: Tensor, response: Tensor, curve: Tensor | None = None
) -> float:
    """The smallest e such that a fault of strength e, of either sign, leaves some element beyond
    its margin.

    error: the element's own; response: what it changes by per unit of e, to first order; curve: at
    most this times e^2 is the rest.  The best element counts for each sign, and the worse sign.
    """
    if not error.numel():
        return math.inf
    signed = torch.copysign(error, error * response)
    strengths, size = [], response.abs()
    for sign in (1, -1):
        need = torch.sub(margin, signed, alpha=sign)
        if curve is None:
            e = need / size
        else:
            root = size.square() - 4 * curve * need
            e = torch.where(root >= 0, 2 * need / (size + root.clamp(min=0.0).sqrt()), torch.inf)
        strengths.append(float(e.nan_to_num(nan=torch.inf).min()))
    return max(strengths)


def _rules(dtype: str, name: str, want: Tensor, response: Tensor) -> dict[str, float]:
    """The strength at which a comparison with absolute and relative tolerances hears such a fault
    in an otherwise exact kernel."""
    found = {}
    size = response.abs()
    for rule, pair in (("tutorial", TUTORIAL), ("close", CLOSE.get(dtype))):
        if pair is None or not response.numel():
            continue
        if not pair[1]:
            e = pair[0] / size.max()
        else:
            e = (pair[1] * want.abs()).add_(pair[0]).div_(size).min()
        found[f"{rule}_{name}"] = float(e)
    return found


def _finite(found: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if math.isfinite(value)}
