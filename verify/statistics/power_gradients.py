"""The smallest fault of each class of a backward that a passing case would have convicted;
docs/power.md derives the closed forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from references.row_blocks import RowBlock, row_blocks
from verify.judging.compared import noted
from verify.judging.launch import Launch
from verify.judging.stacked import joined, together
from verify.judging.trial import Trial
from verify.problem import Problem
from verify.statistics.block_rows import BlockRows, of_block, of_stack
from verify.statistics.power import (
    Largest,
    columns,
    finite,
    lightest_of_each,
    margin_of,
    of_factors,
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
    """What the gradients of a case show without its weights, of that launch and truth.  pairs: what
    the rows show that were read together with others'; None: they are to be read."""

    run: Launch
    truth: GradientTruth
    found: Mapping[str, float]
    pairs: Mapping[str, float] | None = None


def gradient_power(trial: Trial) -> dict[str, float]:
    """The strengths that a backward certifies: `power_dq`, `power_dk` and `power_dv` of a factor 1
    + e, `power_read_lse` of an LSE that is read off by e, natural units, `power_delta` of a delta
    times 1 + e, and `power_ds_pair` of a lost dS of a pair of weight e."""
    with trial.clock.timed("power"):
        own = noted(trial, _NOTE, _Strengths, trial.gradients) or _strengths([trial])[0]
        found = dict(own.found)
        pairs: list[Mapping[str, float]] = [] if own.pairs is None else [own.pairs]
        if own.pairs is None:
            blocks = _blocks(trial)
            pairs += [_of_pairs(of_block(trial, block, _results(trial)))[0] for block in blocks]
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


def certify_rows(stack: Sequence[Trial]) -> None:
    """The same of what follows from the weights of some rows, which are read together."""
    for trial, own in zip(stack, _of_pairs(of_stack(stack, _results, positions_of)), strict=True):
        known = noted(trial, _NOTE, _Strengths, trial.gradients)
        if known is not None:
            trial.notes[_NOTE] = replace(known, pairs=own)


def positions_of(p: Problem) -> Tensor:
    """Of some rows of every head, int64; none where the slope of a score mod, or factors, are in
    dS."""
    if p.score_mod is not None or not p.scale or not p.pairs:
        return torch.zeros(0, dtype=torch.int64)
    heads = p.batch * p.heads_q
    work = float(heads * p.seqlen_kv * 3 * (p.head_dim + p.head_dim_v))
    count = min(max(_ROWS // heads, 1), int(_WORK // work))
    return chosen(p.seqlen_q, heads, work, p.seed)[:count]


def _blocks(trial: Trial) -> list[RowBlock]:
    rows, attention = positions_of(trial.problem), trial.problem.attention
    return list(row_blocks(*trial.expanded, attention, rows=rows)) if len(rows) else []


def _results(trial: Trial) -> dict[str, Tensor]:
    """Of all rows: what was saved, LSE natural, dO, exact dQ and its bounds."""
    truth, (out, lse) = trial.gradients, trial.start
    found = {"out": out, "lse": lse, "dout": trial.dout}
    return found | {"dq": truth.dq, "dq_bound": truth.dq_bound}


@dataclass(frozen=True)
class _Pairs:
    """P and dS of a block's rows from what was saved, (heads, rows, keys); delta (heads, rows, 1);
    K of each query head; fp64."""

    p: Tensor
    ds: Tensor
    delta: Tensor
    k: Tensor

    @staticmethod
    def of(rows: BlockRows) -> _Pairs:
        block = rows.block
        k = block.keys_of_heads.repeat_interleave(rows.problem.group, 0)
        out, lse, dout = (rows.known[name].double() for name in ("out", "lse", "dout"))
        off = torch.where(block.lse.isfinite(), block.lse - lse, 0.0)
        p = block.probabilities * off.exp()[..., None]
        delta = (dout * out).nan_to_num(nan=0.0).sum(-1, keepdim=True)
        return _Pairs(p, p * (torch.bmm(dout, block.values.mT) - delta), delta, k)


def _of_pairs(rows: BlockRows) -> list[dict[str, float]]:
    """The classes that dQ shows in each case: of delta, and of the dS of one pair.  dS may be
    rounded anew."""
    scale, pairs, cases = rows.problem.scale, _Pairs.of(rows), rows.cases
    want, bound = (rows.known[name].double() for name in ("dq", "dq_bound"))
    margin = margin_of(want, bound, rows.problem.format)
    response = (scale * pairs.delta * torch.bmm(pairs.p, pairs.k)).abs_()
    limit = margin + bound
    heard = torch.zeros_like(pairs.p, dtype=torch.bool)
    for column in columns(limit):
        at = column[:, None, :].expand(-1, pairs.k.shape[1], -1)
        k = pairs.k.gather(-1, at).mT
        heard |= (scale * pairs.ds * k).abs() > limit.gather(-1, column[..., None])
    found = {
        "power_delta": smallest_of(bound, margin, response, cases),
        "power_ds_pair": lightest_of_each(pairs.p, heard, cases),
    }
    return told(found)
