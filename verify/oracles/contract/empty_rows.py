"""Empty rows: measure the O and raw LSE of queries that see no key, due to a mask or a length of
zero."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from references.masks import Lengths
from references.premises import Premise
from verify.cell.arena import different
from verify.judging.measuring import Measured, checked, number
from verify.judging.trial import Trial
from verify.problem import Problem

# Only the keys that a row sees have weight.
NEEDS = frozenset({Premise.VISIBLE_MASS_ONLY})


def measure(trial: Trial) -> list[Measured]:
    """Measure O and LSE of the rows without a key, in two runs; over different garbage if runs
    repeat."""
    p = trial.problem
    empty = ~p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv).any(-1)
    if not bool(empty.any()):
        return []
    contract = trial.declaration.contract
    again = checked(trial, trial.run("again", poison="huge" if contract.deterministic else "nan"))
    kind = "zero length" if _no_keys(p) else "empty row"
    declared = {"out": ("O", contract.empty_row_out), "lse": ("LSE", contract.empty_row_lse)}
    found = []
    for name, tensor in trial.first.outputs.items():
        title, promised = declared[name]
        rows = tensor[empty]
        means = _means(trial)[empty] if name == "out" else None
        word = (
            _word(rows, means, p)
            if _same(rows, again.outputs[name][empty])
            else "whatever the memory held"
        )
        found.append(
            Measured(
                name=f"{title} of {kind}",
                word=word,
                declared=number(promised),
                contradicts=word != number(promised),
                evidence=(
                    f"{p.mask.name}: {int(empty.sum())} rows, the first holds"
                    f" {number(float(rows.flatten()[0]))}"
                ),
            )
        )
    return found


def _no_keys(problem: Problem) -> bool:
    return not problem.seqlen_kv or any(
        isinstance(m, Lengths) and 0 in m.kv_lengths for m in problem.mask.atoms
    )


def _same(rows: Tensor, again: Tensor) -> bool:
    """Return whether both runs hold the same bits, except for signs of zeros."""
    return not bool((different(rows, again) & ~((rows == 0) & (again == 0))).any())


def _means(trial: Trial) -> Tensor:
    """Return the mean of V over all keys, (batch, heads_q, seqlen_q, head_dim_v): the result of a
    softmax of equal scores."""
    p, v = trial.problem, trial.expanded[2].double()
    means = (
        v.mean(2, keepdim=True)
        if p.seqlen_kv
        else torch.full_like(v.sum(2, keepdim=True), math.nan)
    )
    return means.repeat_interleave(p.group, 1).expand(p.shape_out)


def _word(rows: Tensor, means: Tensor | None, problem: Problem) -> str:
    values = rows.double()
    if bool(values.isnan().all()):
        return "NaN"
    first = float(values.flatten()[0])
    if bool((values == first).all()):
        return number(first)
    if means is not None:
        near = (values - means).abs() <= 4 * problem.format_out.unit_roundoff * means.abs().amax()
        if bool(near.all()):
            return "the mean of V"
    return "several values"
