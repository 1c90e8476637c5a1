"""Poison: NaN or huge values where a row does not look change no bit of its O and LSE.

Keys that some rows do not see hold NaN, in some cases infinities, or huge finite values where the
contract wants masked values finite. These rows compute from the same operands as before, so they
keep their bits. A kernel that rescales lazily is held to its bounds instead: the rows of a tile can
vote on when to catch up with the maximum.

Huge keys are only as large as leaves their scores finite, whatever the scale, and finite in fp16
where scores can be fp16: an infinity could spread honestly, since -inf + inf is NaN. Huge values
are finite in the format that V is converted to. Rows that share a maximum are asked if no row of
their tile sees poison. Needs a mask.

Premises: hidden_has_no_effect is what is asked.
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
# its product with any query is finite in fp32, and made so in fp16 where scores may be that
_HUGE_KEY = 2.0**14


@dataclass(frozen=True)
class Poisoning:
    """Spoiled inputs, how many rows of Q, K and V that is, and the rows of O that must not notice
    (batch, heads_q, rows)."""

    inputs: Inputs
    count: int
    untouched: Tensor


def poisoned(trial: Trial) -> Poisoning:
    """The trial's poisoning, made once."""
    if "poison" not in trial.notes:
        trial.notes["poison"] = _poison(trial)
    found = trial.notes["poison"]
    assert isinstance(found, Poisoning)
    return found


def _poison(trial: Trial) -> Poisoning:
    """Spoil every key that one row, the pivot, does not see: NaN where the contract lets masked
    values be anything, else huge finite keys and values.  All rows that see no spoiled key must
    keep their bits, those past a length included."""
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
    """What every element of a spoiled key is: a score that overflows is infinite, and then spreads
    from a masked place."""
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
    """What every element of a spoiled value is: finite in the format that V is converted to."""
    a = resolve(trial.declaration.numerics, trial.config, trial.problem, trial.arch)
    if a.conversion is None or a.conversion.limit == math.inf:
        return trial.problem.format.max
    return math.ldexp(1.0, math.frexp(a.conversion.limit)[1] - 1)


def _spoil(stored: Tensor, used: Tensor, poison: float) -> tuple[Tensor, Tensor]:
    """A stored tensor with poison in the rows that none of the sequences and heads sharing them
    uses, and which these are."""
    for dim in (0, 1):
        if stored.shape[dim] == 1:
            used = used.any(dim, keepdim=True)
    result = stored.clone()
    # as bits: torch assigns no 8-bit floats
    bits(result)[~used] = bits(torch.tensor(poison, dtype=stored.dtype))
    return result, ~used


def judge(trial: Trial) -> Ruling:
    """A clean run and a poisoned one, bitwise on the rows that look at no poison; within bounds
    where nothing is bitwise.

    Of rows that are outside the declared arithmetic nothing is asked: see `beyond_arithmetic`.
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
    """Where two runs may differ anyway: the rows that look at no poison must still be right."""
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
    catches="0 * NaN leaks, unmasked tails, masked keys that still weigh, causality that leaks",
    judge=judge,
    excludes=_applies,
    needs=frozenset({Premise.HIDDEN_HAS_NO_EFFECT}),
    concerns=lambda trial: poisoned(trial).count > 0,
)
