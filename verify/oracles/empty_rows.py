"""Empty rows: for a query that sees no key, O and the raw LSE hold exactly what the contract says.

The values must be equal, up to the sign of zero; NaN equals NaN. The softmax of no score is 0 / 0,
so only a convention can say what such a row holds: the contract declares it (`empty_row_out`,
`empty_row_lse`). An O in 8 bits holds the declared value times its scale, rounded. There is no
slack. A row is excused only if the declared arithmetic can overflow: a masked score of infinity can
turn the row into NaN.

Premises: softmax sums over the keys that a row sees, and nothing else (visible_mass_only).
"""

from __future__ import annotations

import math

import torch

from references.premises import Premise
from verify.arithmetic.rounding import cast
from verify.judging.findings import Ruling, convict, first, first_place
from verify.judging.metamorphic import beyond_arithmetic
from verify.judging.trial import Trial
from verify.oracles import Oracle
from verify.problem import Problem
from verify.tolerance.scaled_output import stored


def judge(trial: Trial) -> Ruling:
    """Check that empty rows equal the contract's values, up to the sign of zero; NaN equals NaN."""
    run, contract = trial.first, trial.declaration.contract
    empty = trial.truth.empty
    assert run.out is not None
    held = _held(contract.empty_row_out, trial.problem)
    checks = [("out", run.out, empty[..., None].expand(run.out.shape), held)]
    if run.lse is not None:
        checks.append(("lse", run.lse, empty, contract.empty_row_lse))
    for name, tensor, where, promised in checks:
        same = torch.isnan(tensor) if math.isnan(promised) else tensor == promised
        bad = where & ~same
        if bool(bad.any()):  # a masked score of infinity can turn an empty row into NaN
            excused = beyond_arithmetic(trial)
            bad &= ~(excused[..., None] if name == "out" else excused)
        if bool(bad.any()):
            got = float(tensor[first(bad)])
            message = (
                f"{name} of a row without a visible key is {got}, the contract says {promised};"
                f" {int(bad.sum())} elements differ (first: {first_place(name, bad)})"
            )
            return convict("empty_rows", message, name=name, bad=bad, got=got, bound=promised)
    return Ruling()


def _held(promised: float, problem: Problem) -> float:
    """What O holds for that value of the contract: an O in 8 bits, its rounded multiple."""
    if problem.scaled_output is None:
        return promised
    value = stored(torch.tensor([promised], dtype=torch.float64), problem.scaled_output)
    return float(cast(value.numpy(), problem.format_out))


ORACLE = Oracle(
    name="empty_rows",
    group="accuracy",
    catches="(-inf) - (-inf), 0 / 0, finite sentinels and unwritten rows if a query sees no key",
    judge=judge,
    needs=frozenset({Premise.VISIBLE_MASS_ONLY}),
    concerns=lambda trial: bool(trial.truth.empty.any()),
    rank=30,
)
