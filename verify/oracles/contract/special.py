"""NaN and infinity: measure which rows they reach, from Q, K and V that rows read and from hidden
keys.

A NaN that a row reads must reach the result as the contract says.  No kernel promises the result of
an infinity, but a row that reads neither an infinity nor a NaN must not change.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from references.masks import Full
from references.premises import Premise
from verify.cell.arena import bits
from verify.judging.findings import first
from verify.judging.measuring import Measured, plain, result, run_probe
from verify.judging.trial import Trial
from verify.problem.inputs import Inputs
from verify.tolerance.maxima import whole_tiles
from verify.tolerance.resolution import resolve

# An infinity in K makes a score infinite, and hidden keys have no effect.
NEEDS = frozenset({Premise.UNBOUNDED_SCORES, Premise.HIDDEN_HAS_NO_EFFECT})
_KEY = 1
_NAN = "NaN in "
_NONE = "no effect"


def measure(trial: Trial) -> list[Measured]:
    """Measure NaN in one query, key and value, infinities, and NaN at keys that some rows of a tile
    do not see."""
    p = trial.problem
    if p.seqlen_kv <= _KEY or not p.seqlen_q:
        return []
    visible = _visible(trial) if plain(trial) else []
    return visible if isinstance(p.mask, Full) else visible + _hidden(trial)


def _visible(trial: Trial) -> list[Measured]:
    """Measure special values in the first key head's second key, and in a query that reads it."""
    p, inputs = trial.problem, trial.inputs
    heads = slice(0, p.group)
    # rows that read that key, or can read it through a tile
    near = torch.zeros(p.shape_q[:3], dtype=torch.bool)
    near[0, heads] = True
    readers = near & p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)[..., _KEY]
    if not bool(readers.any()):
        return []
    one = torch.zeros_like(near)
    row = first(readers)
    one[row] = True
    a = resolve(trial.declaration.numerics, trial.config, p, trial.arch)
    far = ~whole_tiles(one, a.maximum_rows)  # rows that share no maximum with this one
    found = [
        _reach(trial, "NaN in Q", replace(inputs, q=_put(inputs.q, row, math.nan)), one, far),
        _reach(
            trial,
            "NaN in K",
            replace(inputs, k=_put(inputs.k, (0, 0, _KEY), math.nan)),
            readers,
            ~near,
        ),
        _reach(
            trial,
            "NaN in V",
            replace(inputs, v=_put(inputs.v, (0, 0, _KEY), math.nan)),
            readers,
            ~near,
            column=True,
        ),
    ]
    if p.format.has_infinity:
        spoiled = replace(inputs, v=_put(inputs.v, (0, 0, _KEY), math.inf))
        found.append(_reach(trial, "infinity in V", spoiled, readers, ~near, column=True))
        queries = inputs.q[..., 0].double().expand(near.shape) * (1 if p.scale >= 0 else -1)
        for name, rows in {"score of +inf": queries > 0, "score of -inf": queries < 0}.items():
            if bool((readers & rows).any()):
                spoiled = replace(inputs, k=_put(inputs.k, (0, 0, _KEY), math.inf))
                found.append(_reach(trial, name, spoiled, readers & rows, ~near))
    return found


def _put(stored: Tensor, index: tuple[int, ...], value: float) -> Tensor:
    """Return a copy with a special value in the first element of row (batch, head, position)."""
    changed = stored.clone()
    bits(changed)[(*index, 0)] = _bits_of(value, stored)
    return changed


def _bits_of(value: float, like: Tensor) -> Tensor:
    """Return the bits of a value as integers, since torch cannot assign 8-bit floats."""
    return bits(torch.tensor(value).to(like.dtype))


def _reach(
    trial: Trial,
    name: str,
    inputs: Inputs,
    readers: Tensor,
    others: Tensor,
    *,
    column: bool = False,
) -> Measured:
    """Measure the results of the rows that read a special value, and whether it reaches `others`,
    which do not read it."""
    run = run_probe(trial, name, trial.problem, inputs).first
    got = result(run).double()
    leaks = ~got[others].isfinite()
    out = _values(got[readers][:, 0] if column else got[readers])
    lse = "" if run.lse is None or column else _values(run.lse[readers])
    word = f"{out}, LSE {lse}" if lse else out
    if column and got.shape[-1] > 1:
        word += "" if bool(got[readers][:, 1:].isfinite().all()) else ", and its whole rows"
    if bool(leaks.any()):
        promised, evidence = (
            "no row but those that read it",
            f"{int(leaks.any(-1).sum())} other rows are no longer finite",
        )
        return Measured(
            name=name,
            word=f"{word}; reaches other rows",
            declared=promised,
            contradicts=True,
            evidence=evidence,
        )
    contract = trial.declaration.contract.nan
    if not name.startswith(_NAN) or contract == "any":
        return Measured(name=name, word=word)
    promised = "NaN" + (", LSE NaN" if contract == "propagates" else ", any LSE") * bool(lse)
    broken = out != "NaN" or (contract == "propagates" and lse not in ("", "NaN"))
    evidence = f"rows that read it: {int(readers.sum())}" if broken else ""
    return Measured(name=name, word=word, declared=promised, contradicts=broken, evidence=evidence)


def _values(got: Tensor) -> str:
    """Name the kinds of the values: NaN, +inf, -inf, 0, finite."""
    kinds = {"NaN": got.isnan(), "+inf": got == math.inf, "-inf": got == -math.inf, "0": got == 0}
    there = [name for name, where in kinds.items() if bool(where.any())]
    finite = got.isfinite() & (got != 0)
    return " or ".join([*there, "finite"] if bool(finite.any()) else there)


def _hidden(trial: Trial) -> list[Measured]:
    """Measure NaN in the last key and in its value, if some rows see that key and others do not."""
    p, contract = trial.problem, trial.declaration.contract
    seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
    blind, sees = ~seen[..., -1] & seen.any(-1), seen[..., -1]
    if not bool(blind.any()) or not bool(sees.any()):
        return []
    spreading = []
    for name in ("k", "v"):
        stored = getattr(trial.inputs, name).clone()
        bits(stored)[:, :, -1] = _bits_of(math.nan, stored)
        run = run_probe(trial, f"hidden {name}", p, replace(trial.inputs, **{name: stored})).first
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
