"""Poison: NaN or huge values that a row does not see change no bit of its O and LSE.

Keys that some rows do not see hold NaN, in some cases infinities, or huge finite values if the
contract requires finite masked values. These rows compute from the same operands as before, so they
keep their bits. A kernel that rescales lazily, or is not declared deterministic, is compared within
its bounds instead: the rows of a tile can vote on when to catch up with the maximum.

Huge keys are small enough that their scores are finite for any scale, in fp16 too if scores can be
fp16: a correct kernel can spread an infinity, since -inf + inf is NaN. Huge values are finite in
the format that V is converted to. Rows that share a maximum are judged if no row of their tile sees
poison. The kernel must support a mask.

What may be NaN is what the contract says of masked values. Under "any" every poisoned key and value
is. Under "padding" those are that lie in front of the first and behind the last key which some row
of their sequence and key head sees, as behind the end of a shorter sequence; a key that some rows
see and others do not is huge. Under both a row of Q that sees no key is NaN. Under "finite" all are
huge.

Backward: for a pair that the mask hides P and dS are 0. With O and LSE as the forward saved them,

    dQ_i = s sum_j dS_ij K_j      dK_j = s sum_i dS_ij Q_i      dV_j = sum_i P_ij dO_i

depend on visible pairs alone. So dQ of a row stays as it is if the row and all keys that it sees
do, and dK and dV of a key if the key and all rows that see it do. If the backward makes its own
softmax, or its delta of P dP, then a row that sees a poisoned key has another P or delta, and the
keys that it sees are left out too. A key that no row sees has dK = dV = 0, and a row that sees no
key dQ = 0, whatever lies there. Poisoned are K and V of the keys that one row, the pivot, does not
see, and Q and dO of the rows that do not see one of that row's keys: so at least that row and that
key are judged. A problem without padding gets some, by shorter lengths, if the support has them.

- A hidden pair of a visible block is computed like any other: its K, V, Q and dO must be finite,
  or 0 * NaN spreads. There the poison is huge. All scores, dP and delta stay finite, since a P
  that is 0 also multiplies dP - delta. It shows a P that is multiplied by 0 after its exponential,
  which overflows; a finite number in place of -inf; and a dS that is not masked.
- Padding, K and V as above and rows of Q and dO that see no key, is NaN if the contract has
  "padding" or "any" (`masked_values_backward`).
- O and LSE of a row without a key are not poisoned: they are what the forward's contract says, and
  a backward can need that, as an LSE of +inf makes P = 0.
- Columns past the head dim and the memory around all views hold NaN in every run of every oracle.

Gradients are compared bit for bit with those of the clean run if they repeat, else with the truth
within their bounds. Elements that can overflow the declared arithmetic are not judged.

Premises: the oracle tests hidden_has_no_effect itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from references.premises import Premise
from verify.arithmetic.dtypes import dtype_named
from verify.judging.comparison import compare
from verify.judging.findings import Ruling, convict, first, place
from verify.judging.launch import Launch
from verify.judging.metamorphic import beyond_arithmetic, check_same_bits
from verify.judging.poisoning import (
    HUGE,
    GradientPoisoning,
    between_read,
    gradient_poisoning,
    keys_read,
    padded,
    special_value,
    spoil,
)
from verify.judging.run_checks import fault
from verify.judging.together import Wanted
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.problem.inputs import Inputs
from verify.tolerance.maxima import whole_tiles
from verify.tolerance.resolution import resolve
from verify.variant import Declaration

_FLOAT32 = dtype_named("float32")
_KINDS = {
    "any": "NaN or infinities",
    "padding": "NaN or infinities in padding, and huge values",
    "finite": "huge values",
}


@dataclass(frozen=True)
class Poisoning:
    """Poisoned inputs, the number of poisoned rows of Q, K and V, and the rows of O that must not
    change, (batch, heads_q, rows) booleans."""

    inputs: Inputs
    count: int
    untouched: Tensor


def poisoned(trial: Trial) -> Poisoning:
    """Return the trial's poisoning, computed once."""
    return trial.noted("poison", _poison)


def _poison(trial: Trial) -> Poisoning:
    """Poison every key that one row, the pivot, does not see, with NaN or infinity where the
    contract allows these, else with huge finite keys and values.  All rows that see no poisoned key
    must keep their bits, rows past a length too."""
    p, inputs = trial.problem, trial.inputs
    seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
    pivot = seen[:, :, p.seed % p.seqlen_q] if p.seqlen_q else seen.any(2)
    used = pivot.reshape(p.batch, p.heads_kv, p.group, p.seqlen_kv).any(2)
    allowed, special = trial.declaration.contract.masked_values, special_value(p)
    anything = allowed == "any"
    k_poison, v_poison = (special,) * 2 if anything else (_huge_key(trial), _huge_value(trial))
    k, k_spoiled = spoil(inputs.k, used, k_poison)
    v, v_spoiled = spoil(inputs.v, used, v_poison)
    if allowed == "padding":
        inner = between_read(keys_read(p, seen))
        k, v = (spoil(x, inner, special)[0] for x in (k, v))
    spoiled = (k_spoiled.expand(used.shape) | v_spoiled.expand(used.shape)).repeat_interleave(
        p.group, 1
    )
    untouched = ~(seen & spoiled[:, :, None]).any(-1)
    shared = resolve(trial.declaration.numerics, trial.config, p, trial.arch).maximum_rows
    untouched = ~whole_tiles(~untouched, shared)
    found = Poisoning(replace(inputs, k=k, v=v), int(k_spoiled.sum() + v_spoiled.sum()), untouched)
    if allowed == "finite":
        return found
    q, q_spoiled = spoil(inputs.q, seen.any(3), float("nan"))
    return replace(
        found, inputs=replace(found.inputs, q=q), count=found.count + int(q_spoiled.sum())
    )


def _huge_key(trial: Trial) -> float:
    """Return the element of a poisoned key.  Its scores must not overflow: an infinite score would
    spread from a masked position."""
    p = trial.problem
    found = min(HUGE, p.format.max)
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


def _launches(trial: Trial) -> tuple[Wanted, ...]:
    return (Wanted(trial, "poisoned", inputs=poisoned(trial).inputs),)


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
    kind = _KINDS[trial.declaration.contract.masked_values]
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


def _launches_backward(trial: Trial) -> tuple[Wanted, ...]:
    return (Wanted(trial, "poisoned", inputs=gradient_poisoning(trial).inputs),)


def judge_backward(trial: Trial) -> Ruling:
    """Compare the gradients of a clean run and of a poisoned run that no poison reaches: bit for
    bit, or with the truth within bounds if runs do not repeat bit for bit."""
    poisoning = gradient_poisoning(trial)
    run = trial.run("poisoned", inputs=poisoning.inputs)
    ruling = fault(trial, run)
    if ruling is not None:
        return ruling
    contract = trial.declaration.contract
    when = (
        f"{_KINDS[contract.masked_values_backward]} in {poisoning.count} rows of Q, K, V and dO,"
        " looked at in gradients that depend on none of them"
    )
    if not contract.deterministic_backward:
        return _gradients_within_bounds(trial, run, poisoning, when)
    pairs = [(name, clean, run.outputs[name]) for name, clean in trial.first.outputs.items()]
    return check_same_bits(
        "poison_backward",
        when,
        pairs,
        poisoning.kept,
        lambda name: ~getattr(trial.gradients, f"{name}_bound").isfinite(),
    )


def _gradients_within_bounds(
    trial: Trial, run: Launch, poisoning: GradientPoisoning, when: str
) -> Ruling:
    """Check the gradients that no poison reaches within the bounds of the clean problem."""
    truth = trial.gradients
    for name, got in run.outputs.items():
        want, bound = (getattr(truth, f"{name}{end}") for end in ("", "_bound"))
        ratio = compare(got, want, bound, trial.problem.format).ratio
        bad = ~(ratio <= 1) & poisoning.kept[name][..., None]
        if bool(bad.any()):
            at = first(bad)
            message = (
                f"{when}: {name} is {float(got[at]):.9g} at {place(name, at)}, should be"
                f" {float(want[at]):.9g} within {float(bound[at]):.4g}; {int(bad.sum())} of"
                f" {bad.numel()} elements are out of bounds"
            )
            return convict(
                "poison_backward",
                message,
                name=name,
                bad=bad,
                got=float(got[at]),
                bound=float(bound[at]),
            )
    return Ruling()


GROUP = Group(
    name="poison_backward",
    about="NaN or huge values where a gradient does not depend on them",
    entry="backward",
    family="relations",
    masked=True,
    adapt=padded,
)

FORWARD = Oracle(
    name="poison",
    group="poison",
    catches="0 * NaN, unmasked tails, masked keys that have weight, rows that read later keys",
    judge=judge,
    launches=_launches,
    excludes=_applies,
    needs=frozenset({Premise.HIDDEN_HAS_NO_EFFECT}),
    concerns=lambda trial: poisoned(trial).count > 0,
)

BACKWARD = Oracle(
    name="poison_backward",
    group="poison_backward",
    catches=(
        "0 * NaN and 0 * infinity in gradients: a P that is masked by multiplication, a dS that is"
        " not masked, padding that enters dQ, dK or dV"
    ),
    judge=judge_backward,
    launches=_launches_backward,
    excludes=_applies,
    needs=frozenset({Premise.HIDDEN_HAS_NO_EFFECT}),
    concerns=lambda trial: gradient_poisoning(trial).count > 0,
)

ORACLES = (FORWARD, BACKWARD)
