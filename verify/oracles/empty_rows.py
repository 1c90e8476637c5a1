"""Empty rows: a query that sees no key gets exactly what the contract says, in O and in the raw LSE."""

from __future__ import annotations

import torch
from torch import Tensor

from verify.evidence import Finding
from verify.oracles import Oracle
from verify.trial import Ruling, Trial, first_place


def judge(trial: Trial) -> Ruling:
    """Bitwise up to the sign of zero; NaN equals NaN where the contract promises NaN."""
    run, contract = trial.first, trial.declaration.contract
    empty = trial.truth.empty
    assert run.out is not None
    checks = [("out", run.out, empty[..., None].expand(run.out.shape), contract.empty_row_out)]
    if run.lse is not None:
        checks.append(("lse", run.lse, empty, contract.empty_row_lse))
    for name, tensor, where, promised in checks:
        bad = where & ~_same(tensor, promised)
        count = int(bad.sum())
        if count:
            got = float(tensor[tuple(bad.nonzero()[0])])
            message = f"{name} of a row without a visible key is {got}, the contract says {promised}; {count} elements differ"
            spot = first_place(name, bad)
            return Ruling(
                Finding(
                    oracle="empty_rows",
                    message=f"{message} (first: {spot})",
                    got=got,
                    bound=promised,
                    where=spot,
                    count=count,
                    total=int(where.sum()),
                )
            )
    return Ruling()


def _same(tensor: Tensor, promised: float) -> Tensor:
    return torch.isnan(tensor) if promised != promised else tensor == promised


ORACLE = Oracle(
    name="empty_rows",
    group="accuracy",
    catches="(-inf) - (-inf), 0 / 0, finite sentinels and unwritten rows where a query sees nothing",
    judge=judge,
    concerns=lambda trial: bool(trial.truth.empty.any()),
    rank=30,
)
