"""NaN and infinity: how far they reach from Q, K and V that rows read, and from keys that a mask hides.

No kernel promises how a value that a row reads turns out; but a row that does not read it must not change.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from references.masks import Full
from verify.contracts import Measured, ask, plain, result
from verify.inputs import Inputs
from verify.memory import bits
from verify.trial import Trial

_KEY = 1
_NONE = "no effect"


def measure(trial: Trial) -> list[Measured]:
    """NaN in one query, key and value, infinities, and NaN at keys that some rows of a tile do not see."""
    p = trial.problem
    if p.softcap or p.seqlen_kv <= _KEY or not p.seqlen_q:
        return []
    if not isinstance(p.mask, Full):
        return _hidden(trial)
    return _visible(trial) if plain(trial) else []


def _visible(trial: Trial) -> list[Measured]:
    p, inputs = trial.problem, trial.inputs
    heads = slice(0, p.group)
    readers = torch.zeros(p.shape_q[:3], dtype=torch.bool)
    readers[0, heads] = True
    one = torch.zeros_like(readers)
    one[0, 0, 0] = True
    found = [
        _reach(trial, "NaN in Q", replace(inputs, q=_put(inputs.q, (0, 0, 0), math.nan)), one),
        _reach(trial, "NaN in K", replace(inputs, k=_put(inputs.k, (0, 0, _KEY), math.nan)), readers),
        _reach(trial, "NaN in V", replace(inputs, v=_put(inputs.v, (0, 0, _KEY), math.nan)), readers, column=True),
    ]
    if p.format.has_infinity:
        spoiled = replace(inputs, v=_put(inputs.v, (0, 0, _KEY), math.inf))
        found.append(_reach(trial, "infinity in V", spoiled, readers, column=True))
        queries = inputs.q[0, heads, :, 0].double() * (1 if p.scale >= 0 else -1)
        for name, rows in {"score of +inf": queries > 0, "score of -inf": queries < 0}.items():
            where = torch.zeros_like(readers)
            where[0, heads] = rows
            if bool(where.any()):
                spoiled = replace(inputs, k=_put(inputs.k, (0, 0, _KEY), math.inf))
                found.append(_reach(trial, name, spoiled, where, others=~readers))
    return found


def _put(stored: Tensor, index: tuple[int, int, int], value: float) -> Tensor:
    """A copy whose row at (batch, head, position) begins with a special value."""
    changed = stored.clone()
    bits(changed)[(*index, 0)] = _bits_of(value, stored)
    return changed


def _bits_of(value: float, like: Tensor) -> Tensor:
    """As integers, since torch assigns no 8-bit floats."""
    return bits(torch.tensor(value).to(like.dtype))


def _reach(
    trial: Trial, name: str, inputs: Inputs, readers: Tensor, *, column: bool = False, others: Tensor | None = None
) -> Measured:
    """What the rows that read a special value hold, and whether it reaches rows that do not (`others`, by default the rest)."""
    run = ask(trial, name, trial.problem, inputs).first
    got = result(run).double()
    outside = ~readers if others is None else others
    leaks = ~got[outside].isfinite()
    word = _values(got[readers][:, 0] if column else got[readers])
    if column and got.shape[-1] > 1:
        word += "" if bool(got[readers][:, 1:].isfinite().all()) else ", and its whole rows"
    if run.lse is not None and not column:
        word += f", LSE {_values(run.lse[readers])}"
    promised = ""
    if bool(leaks.any()):
        word, promised = f"{word}; reaches other rows", "no row but those that read it"
    evidence = f"{int(leaks.any(-1).sum())} other rows are no longer finite" if promised else ""
    return Measured(name=name, word=word, declared=promised, contradicts=bool(promised), evidence=evidence)


def _values(got: Tensor) -> str:
    """In words, what kinds of values these are."""
    kinds = {"NaN": got.isnan(), "+inf": got == math.inf, "-inf": got == -math.inf, "0": got == 0}
    there = [name for name, where in kinds.items() if bool(where.any())]
    finite = got.isfinite() & (got != 0)
    return " or ".join([*there, "finite"] if bool(finite.any()) else there)


def _hidden(trial: Trial) -> list[Measured]:
    """NaN in the last key, and in its value, where some rows see that key and others do not."""
    p, contract = trial.problem, trial.declaration.contract
    seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
    blind, sees = ~seen[..., -1] & seen.any(-1), seen[..., -1]
    if not bool(blind.any()) or not bool(sees.any()):
        return []
    spreading = []
    for name in ("k", "v"):
        stored = getattr(trial.inputs, name).clone()
        bits(stored)[:, :, -1] = _bits_of(math.nan, stored)
        run = ask(trial, f"hidden {name}", p, replace(trial.inputs, **{name: stored})).first
        if bool(result(run)[blind].isnan().any()):
            spreading.append(name.upper())
    word = f"spreads from {' and '.join(spreading)}" if spreading else _NONE
    promised = _NONE if contract.masked_values == "any" else ""
    return [
        Measured(
            name="NaN behind a mask",
            word=word,
            declared=promised or "may spread",
            contradicts=bool(promised and spreading),
            evidence=f"{p.mask.name}: {int(blind.sum())} rows do not see the last key",
        )
    ]
