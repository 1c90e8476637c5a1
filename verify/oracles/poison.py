"""Poison: NaN or huge values in keys and queries that nobody looks at change no bit of O or LSE."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from verify.arithmetic.dtypes import dtype_named
from verify.evidence import Finding
from verify.inputs import Inputs
from verify.oracles import Oracle
from verify.oracles.execution import execution, memory
from verify.oracles.repeat import first_difference
from verify.trial import Ruling, Trial, first_place
from verify.variant import Declaration

_HUGE_KEY = 2.0**14  # finite in every format, and so is its product with any query in fp32


def poisoned(trial: Trial) -> tuple[Inputs, int]:
    """The problem's inputs with poison where no pair is visible, and the number of key rows poisoned.

    NaN where the contract says that masked values may be anything, else huge finite keys and values.
    """
    p, inputs = trial.problem, trial.inputs
    seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
    keys = seen.any(2).view(p.batch, p.heads_kv, p.group, p.seqlen_kv).any(2)
    anything = trial.declaration.contract.masked_values == "any"
    format_ = dtype_named(p.dtype)
    k_poison, v_poison = (float("nan"),) * 2 if anything else (_HUGE_KEY, format_.max)
    k, k_rows = _spoil(inputs.k, keys, k_poison)
    v, v_rows = _spoil(inputs.v, keys, v_poison)
    spoiled = replace(inputs, k=k, v=v)
    count = k_rows + v_rows
    if anything:
        q, q_rows = _spoil(inputs.q, seen.any(3), float("nan"))
        spoiled, count = replace(spoiled, q=q), count + q_rows
    return spoiled, count


def _spoil(stored: Tensor, used: Tensor, poison: float) -> tuple[Tensor, int]:
    """Poison the rows of a stored tensor that are used by none of the sequences and heads that share them."""
    for dim in (0, 1):
        if stored.shape[dim] == 1:
            used = used.any(dim, keepdim=True)
    result = stored.clone()
    result[~used] = poison
    return result, int((~used).sum())


def judge(trial: Trial) -> Ruling:
    """A clean run and a poisoned one, bitwise."""
    inputs, count = poisoned(trial)
    if not count:
        return Ruling()
    run = trial.run("poisoned", inputs=inputs)
    for ruling in (execution(trial, run), memory(trial, run)):
        if ruling.finding is not None:
            return ruling
    clean, spoiled = ({"out": r.out, "lse": r.lse} for r in (trial.first, run))
    found = first_difference(clean, spoiled)
    if found is None:
        return Ruling()
    name, different = found
    a, b = clean[name], spoiled[name]
    assert a is not None
    assert b is not None
    at = tuple(different.nonzero()[0])
    kind = "NaN" if trial.declaration.contract.masked_values == "any" else "huge values"
    message = (
        f"{kind} in {count} rows of Q, K and V that no visible pair uses change {name}: {float(a[at]):.9g} became "
        f"{float(b[at]):.9g} at {first_place(name, different)}; {int(different.sum())} of {different.numel()} elements changed"
    )
    got, want = float(b[at]), float(a[at])
    return Ruling(
        Finding(
            oracle="poison",
            message=message,
            got=got,
            bound=want,
            where=first_place(name, different),
            count=int(different.sum()),
            total=different.numel(),
        )
    )


def _applies(declaration: Declaration) -> str | None:
    if not declaration.contract.deterministic:
        return "declared not deterministic"
    return None if set(declaration.support.masks) - {"full"} else "supports no mask"


def _concerns(trial: Trial) -> bool:
    return bool(torch.tensor(poisoned(trial)[1]))


ORACLE = Oracle(
    name="poison",
    group="poison",
    catches="0 * NaN leaks, unmasked tails, masked keys that still weigh",
    judge=judge,
    applies=_applies,
    concerns=_concerns,
)
