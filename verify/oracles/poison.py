"""Poison: NaN or huge values that a row does not see change no bit of its O and LSE.

Keys that some rows do not see hold NaN, in some cases infinities, or huge finite values if the
contract requires finite masked values. These rows compute from the same operands as before, so they
keep their bits. A kernel that rescales lazily, or is not declared deterministic, is compared within
its bounds instead: the rows of a tile can vote on when to catch up with the maximum.

Huge keys are small enough that their scores are finite for any scale, in fp16 too if scores can be
fp16: a correct kernel can spread an infinity, since -inf + inf is NaN. Huge values are finite in
the format that V is converted to. Rows that share a maximum are judged if no row of their tile sees
poison. The kernel must support a mask.

Premises: the oracle tests hidden_has_no_effect itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from references.premises import Premise
from verify.arithmetic.dtypes import dtype_named
from verify.cell.arena import bits
from verify.judging.comparison import compare
from verify.judging.findings import Ruling, convict, first, place
from verify.judging.launch import Launch
from verify.judging.metamorphic import beyond_arithmetic, check_same_bits
from verify.judging.run_checks import fault
from verify.judging.trial import Trial
from verify.oracles import Oracle
from verify.problem.inputs import Inputs
from verify.tolerance.maxima import whole_tiles
from verify.tolerance.resolution import resolve
from verify.variant import Declaration

_FLOAT32 = dtype_named("float32")
# its product with any query is finite in fp32; `_huge_key` reduces it if scores can be fp16
_HUGE_KEY = 2.0**14


@dataclass(frozen=True)
class Poisoning:
    """Poisoned inputs, the number of poisoned rows of Q, K and V, and the rows of O that must not
    change, (batch, heads_q, rows) booleans."""

    inputs: Inputs
    count: int
    untouched: Tensor


def poisoned(trial: Trial) -> Poisoning:
    """Return the trial's poisoning, computed once."""
    if "poison" not in trial.notes:
        trial.notes["poison"] = _poison(trial)
    found = trial.notes["poison"]
    assert isinstance(found, Poisoning)
    return found


def _poison(trial: Trial) -> Poisoning:
    """Poison every key that one row, the pivot, does not see: with NaN or infinity if the contract
    allows any masked values, else with huge finite keys and values.  All rows that see no poisoned
    key must keep their bits, rows past a length too."""
    p, inputs = trial.problem, trial.inputs
    seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
    pivot = seen[:, :, p.seed % p.seqlen_q] if p.seqlen_q else seen.any(2)
    used = pivot.reshape(p.batch, p.heads_kv, p.group, p.seqlen_kv).any(2)
    anything = trial.declaration.contract.masked_values == "any"
    special = float("inf") if p.format.has_infinity and p.seed & 2 else float("nan")
    k_poison, v_poison = (special,) * 2 if anything else (_huge_key(trial), _huge_value(trial))
    k, k_spoiled = _spoil(inputs.k, used, k_poison)
    v, v_spoiled = _spoil(inputs.v, used, v_poison)
    spoiled = (k_spoiled.expand(used.shape) | v_spoiled.expand(used.shape)).repeat_interleave(
        p.group, 1
    )
    untouched = ~(seen & spoiled[:, :, None]).any(-1)
    shared = resolve(trial.declaration.numerics, trial.config, p, trial.arch).maximum_rows
    untouched = ~whole_tiles(~untouched, shared)
    found = Poisoning(replace(inputs, k=k, v=v), int(k_spoiled.sum() + v_spoiled.sum()), untouched)
    if not anything:
        return found
    q, q_spoiled = _spoil(inputs.q, seen.any(3), float("nan"))
    return replace(
        found, inputs=replace(found.inputs, q=q), count=found.count + int(q_spoiled.sum())
    )


def _huge_key(trial: Trial) -> float:
    """Return the element of a poisoned key.  Its scores must not overflow: an infinite score would
    spread from a masked position."""
    p = trial.problem
    found = min(_HUGE_KEY, p.format.max)
    a = resolve(trial.declaration.numerics, trial.config, p, trial.arch)
    limit = min(
        a.scores.domain(p.head_dim), a.score_format.overflow if a.score_format else math.inf
    )
    if not p.pairs:
        return found
    largest = float(trial.inputs.q.double().abs().sum(-1).max()) * max(abs(p.scale), 1.0)
    return min(found, math.ldexp(1.0, math.frexp(limit / max(largest, 1.0))[1] - 2))


def _huge_value(trial: Trial) -> float:
    """Return the element of a poisoned value: finite in the format that V is converted to."""
    a = resolve(trial.declaration.numerics, trial.config, trial.problem, trial.arch)
    if a.conversion is None or a.conversion.limit == math.inf:
        return trial.problem.format.max
    return math.ldexp(1.0, math.frexp(a.conversion.limit)[1] - 1)


def _spoil(stored: Tensor, used: Tensor, poison: float) -> tuple[Tensor, Tensor]:
    """Return a stored tensor with poison in the rows that no sequence or head uses, and the mask of
    these rows."""
    for dim in (0, 1):
        if stored.shape[dim] == 1:
            used = used.any(dim, keepdim=True)
    result = stored.clone()
    # as bits: torch cannot assign 8-bit floats
    bits(result)[~used] = bits(torch.tensor(poison, dtype=stored.dtype))
    return result, ~used


def judge(trial: Trial) -> Ruling:
    """Compare a clean run and a poisoned run in the rows that see no poison: bit for bit, or within
    bounds if runs do not repeat bit for bit.

    Rows that can overflow the declared arithmetic are not judged: see `beyond_arithmetic`.
    """
    poisoning = poisoned(trial)
    run = trial.run("poisoned", inputs=poisoning.inputs)
    ruling = fault(trial, run)
    if ruling is not None:
        return ruling
    rows = poisoning.untouched
    kind = (
        "NaN or infinities" if trial.declaration.contract.masked_values == "any" else "huge values"
    )
    # see `causality`
    if (
        not trial.declaration.contract.deterministic
        or trial.declaration.numerics.softmax.maximum.lag
    ):
        return _within_bounds(trial, run, poisoning)
    pairs = [(name, clean, run.outputs[name]) for name, clean in trial.first.outputs.items()]
    when = (
        f"{kind} in {poisoning.count} rows of Q, K and V, looked at in rows that see none of them"
    )
    return check_same_bits(
        "poison",
        when,
        pairs,
        {name: rows for name, _, _ in pairs},
        lambda _: beyond_arithmetic(trial),
    )


def _within_bounds(trial: Trial, run: Launch, poisoning: Poisoning) -> Ruling:
    """Check the rows that see no poison within their bounds, for kernels whose runs may differ."""
    truth = trial.truth
    rows = poisoning.untouched & ~truth.empty
    wanted = {
        "out": (truth.out, truth.out_bound, trial.problem.format_out),
        "lse": (truth.lse, truth.lse_bound, _FLOAT32),
    }
    for name, got in run.outputs.items():
        want, bound, output = wanted[name]
        value = trial.natural_lse(got) if name == "lse" else got
        bad = ~(compare(value, want, bound, output).ratio <= 1) & rows.view(
            *rows.shape, *[1] * (got.dim() - 3)
        )
        if bool(bad.any()):
            at = first(bad)
            message = (
                f"poison in {poisoning.count} rows of Q, K and V breaks {name} in rows that see"
                f" none of them: {float(value[at]):.9g} at {place(name, at)}, should be"
                f" {float(want[at]):.9g} within {float(bound[at]):.4g}; {int(bad.sum())} of"
                f" {bad.numel()} elements are out of bounds"
            )
            return convict(
                "poison", message, name=name, bad=bad, got=float(value[at]), bound=float(bound[at])
            )
    return Ruling()


def _applies(declaration: Declaration) -> str | None:
    return None if set(declaration.support.masks) - {"full"} else "supports no mask"


ORACLE = Oracle(
    name="poison",
    group="poison",
    catches="0 * NaN, unmasked tails, masked keys that have weight, rows that read later keys",
    judge=judge,
    excludes=_applies,
    needs=frozenset({Premise.HIDDEN_HAS_NO_EFFECT}),
    concerns=lambda trial: poisoned(trial).count > 0,
)
