"""The smallest fault of each class of a backward that a passing case would have convicted;
docs/power.md derives the closed forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from references.row_blocks import RowBlock, row_blocks
from verify.judging.compared import noted
from verify.judging.launch import Launch
from verify.judging.stacked import joined, together
from verify.judging.trial import Trial
from verify.statistics.power import (
    Largest,
    columns,
    finite,
    lightest_of_all,
    margin_of,
    of_factors,
    smallest,
    smallest_of,
    told,
)
from verify.statistics.rows import chosen
from verify.tolerance.backward import GradientTruth

_NOTE = "power"
_ROWS = 16  # of all heads together, at least one of each
_WORK = 1e7  # multiply-adds that these rows may cost


@dataclass(frozen=True)
class _Strengths:
    """What the gradients of a case show without its weights, of that launch and truth."""

    run: Launch
    truth: GradientTruth
    found: Mapping[str, float]


def gradient_power(trial: Trial) -> dict[str, float]:
    """The strengths that a backward certifies: `power_dq`, `power_dk` and `power_dv` of a factor 1
    + e, `power_read_lse` of an LSE that is read off by e, natural units, `power_delta` of a delta
    times 1 + e, and `power_ds_pair` of a lost dS of a pair of weight e."""
    with trial.clock.timed("power"):
        own = noted(trial, _NOTE, _Strengths, trial.gradients) or _strengths([trial])[0]
        found = dict(own.found)
        pairs = [_of_pairs(trial, block) for block in _blocks(trial)]
        for name in pairs[0] if pairs else ():
            found[name] = min(each[name] for each in pairs)
    return finite(found)


def certify_together(stack: Sequence[Trial]) -> None:
    """Compute the strengths of cases of one shape and kernel together, and give each its part."""
    for trial, own in zip(stack, _strengths(stack), strict=True):
        trial.notes[_NOTE] = own


def _strengths(stack: Sequence[Trial]) -> list[_Strengths]:
    p, cases = stack[0].problem, len(stack)
    truth = joined([trial.gradients for trial in stack])
    found: dict[str, Tensor] = {}
    read = torch.full((cases,), torch.inf, dtype=torch.float64)
    for name in stack[0].first.outputs:
        raw = together([trial.first.outputs[name] for trial in stack])
        if not raw.numel():
            continue
        want, bound, got = Largest.of(getattr(truth, name), getattr(truth, f"{name}_bound"), raw)
        margin = margin_of(want, bound, p.format)
        found[f"power_{name}"] = smallest_of(got - want, margin, got, cases)
        found |= of_factors(p.dtype, name, want, cases)
        # Every weight changes, and so may every rounding: what it leaves is within the bound.
        response = (want.abs() - bound).clamp_(min=0.0)
        least = smallest_of(bound, margin, response, cases, response / 2)
        read = torch.minimum(read, least)
    found["power_read_lse"] = read
    return [
        _Strengths(trial.first, trial.gradients, own)
        for trial, own in zip(stack, told(found), strict=True)
    ]


def _blocks(trial: Trial) -> list[RowBlock]:
    """Some rows of every head; none where the slope of a score mod, or factors, are in dS."""
    p = trial.problem
    if p.score_mod is not None or not p.scale or not p.pairs:
        return []
    heads = p.batch * p.heads_q
    work = float(heads * p.seqlen_kv * 3 * (p.head_dim + p.head_dim_v))
    count = min(max(_ROWS // heads, 1), int(_WORK // work))
    rows = chosen(p.seqlen_q, heads, work, p.seed)[:count]
    if not len(rows):
        return []
    return list(row_blocks(*trial.expanded, p.attention, rows=rows))


@dataclass(frozen=True)
class _Pairs:
    """P and dS of a block's rows from what was saved, (heads, rows, keys); delta (heads, rows, 1);
    K of each query head; fp64."""

    p: Tensor
    ds: Tensor
    delta: Tensor
    k: Tensor

    @staticmethod
    def of(trial: Trial, block: RowBlock) -> _Pairs:
        problem, (heads, _), rows = trial.problem, block.index, block.rows
        own = slice(heads.start // problem.group, heads.stop // problem.group)
        k = trial.expanded[1].flatten(0, 1)[own].double().repeat_interleave(problem.group, 0)
        out, lse = (x.flatten(0, 1)[heads][:, rows].double() for x in trial.start)
        dout = trial.dout.flatten(0, 1)[heads][:, rows].double()
        off = torch.where(block.lse.isfinite(), block.lse - lse, 0.0)
        p = block.probabilities * off.exp()[..., None]
        delta = (dout * out).nan_to_num(nan=0.0).sum(-1, keepdim=True)
        return _Pairs(p, p * (torch.bmm(dout, block.values.mT) - delta), delta, k)


def _of_pairs(trial: Trial, block: RowBlock) -> dict[str, float]:
    """The classes that dQ shows: of delta, and of the dS of one pair.  dS may be rounded anew."""
    truth, scale, pairs = trial.gradients, trial.problem.scale, _Pairs.of(trial, block)
    heads, rows = block.index[0], block.rows
    want, bound = (x.flatten(0, 1)[heads][:, rows].double() for x in (truth.dq, truth.dq_bound))
    margin = margin_of(want, bound, trial.problem.format)
    response = (scale * pairs.delta * torch.bmm(pairs.p, pairs.k)).abs_()
    limit = margin + bound
    heard = torch.zeros_like(pairs.p, dtype=torch.bool)
    for column in columns(limit):
        at = column[:, None, :].expand(-1, pairs.k.shape[1], -1)
        k = pairs.k.gather(-1, at).mT
        heard |= (scale * pairs.ds * k).abs() > limit.gather(-1, column[..., None])
    return {
        "power_delta": smallest(bound, margin, response),
        "power_ds_pair": lightest_of_all(pairs.p, heard),
    }
