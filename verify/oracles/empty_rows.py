"""Empty rows: a query that sees no key gets exactly what the contract says, in O and in the raw
LSE.

Bit for bit, up to the sign of zero; NaN equals NaN where the contract promises NaN. The softmax of
no score is 0 / 0, so that only a convention can say what such a row holds: the contract declares
it (`empty_row_out`, `empty_row_lse`). There is no slack. A row is excused only where the declared
arithmetic can overflow: a masked score of infinity can make NaN of it.

Premises: the softmax has nothing but the keys that a row sees (visible_mass_only).
"""

from __future__ import annotations

import math

import torch

from references.premises import Premise
from verify.judging.findings import Ruling, convict, first, first_place
from verify.judging.metamorphic import beyond_arithmetic
from verify.judging.trial import Trial
from verify.oracles import Oracle


def judge(trial: Trial) -> Ruling:
    """Bitwise up to the sign of zero; NaN equals NaN where the contract promises NaN."""
    run, contract = trial.first, trial.declaration.contract
    empty = trial.truth.empty
    assert run.out is not None
    checks = [("out", run.out, empty[..., None].expand(run.out.shape), contract.empty_row_out)]
    if run.lse is not None:
        checks.append(("lse", run.lse, empty, contract.empty_row_lse))
    for name, tensor, where, promised in checks:
        same = torch.isnan(tensor) if math.isnan(promised) else tensor == promised
        bad = where & ~same
        if bool(bad.any()):  # a masked score of infinity may make NaN of a row that sees nothing
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


ORACLE = Oracle(
    name="empty_rows",
    group="accuracy",
    catches=(
        "(-inf) - (-inf), 0 / 0, finite sentinels and unwritten rows where a query sees nothing"
    ),
    judge=judge,
    needs=frozenset({Premise.VISIBLE_MASS_ONLY}),
    concerns=lambda trial: bool(trial.truth.empty.any()),
    rank=30,
)
