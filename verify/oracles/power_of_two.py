"""Powers of two: V times 2^k makes O exactly 2^k times as large; Q times 2^a and K times 2^-a
change no bit of O and LSE.

A second run scales V, Q and K, as far up or down as the problem allows. If there are descales, they
are multiplied instead of the 8-bit values.

The results match bit for bit because the rounding of a scaled number is the scaled rounding, if
nothing underflows or overflows. To ensure this (`verify/judging/power_scaling.py`),

- every nonzero input stays normal in its dtype, also after the multiplication by the scale if the
  kernel declares one; so does every descale of Q and K times the scale in fp32;
- weights are at least 2^-(2 |s| max|q| max|k| log2 e), so that products stay within 2^+-120;
- O is compared if it is normal in its dtype, and above 2^-80, in both runs;
- V keeps its size if the O of parts of the keys is kept in fp16, which can be subnormal there.

Values are `octaves`, 1/4 <= |x| < 2 in eight bits, or small integers; scales are at most
head_dim^-1/2. Kernels with accumulators in fp16 are not judged. Functions that declare nothing can
round any part to fp16, so they are compared within the bounds of the scaled problem alone.

The oracle catches epsilons, clamps, thresholds and narrow intermediates that ordinary values never
reach: a clamp of V at 1000, O + 1e-6, small outputs that are flushed.

Backward: dO times 2^g scales all gradients exactly; Q times 2^a and K times 2^-a scale dQ and dK.
With Q 2^a and K 2^-a, S, P, dP and dS keep their bits, dQ is divided by 2^a and dK is multiplied by
2^a. With dO 2^g, dP, delta and dS are multiplied by 2^g, and so are all gradients. V stays, so O
and LSE keep their bits too. dS can be 34 + 2 |s| |q| |k| log2 e binary places below 1; a and g
share the rest of fp32's range.

If dS or delta is rounded to fp16, which has subnormals in this range, dO is scaled in every second
case only, and then only dV is compared. A gradient whose parts are rounded to fp16, in memory or by
query head, is compared only if its factor is 1: the parts can be subnormal if the whole is not. If
the scale multiplies K first, K must stay normal after this multiplication too.

Premises: scores keep their bits (scale_homogeneous), a factor is multiplied for its whole head
(factors_by_head), norms bound the weights that are flushed (norm_bounded_scores) among visible keys
alone (visible_mass_only), O is linear in V (linear_in_values) and rounded once (exact_output).
"""

from __future__ import annotations

import math

from torch import Tensor

from references.premises import Premise
from verify.arithmetic.dtypes import DType, dtype_named
from verify.judging.comparison import compare, excess
from verify.judging.findings import Ruling
from verify.judging.metamorphic import check_same_bits, failed
from verify.judging.power_scaling import (
    SHORTEST,
    Powers,
    chosen,
    normal,
    powers,
    room,
    scaled,
    spread_of_weights,
    tamed,
    times,
    wide,
)
from verify.judging.together import first_of
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.problem.premises import broken
from verify.variant import Declaration, GradientNumerics

_NEEDS = frozenset(
    {
        Premise.SCALE_HOMOGENEOUS,
        Premise.FACTORS_BY_HEAD,
        Premise.NORM_BOUNDED_SCORES,
        Premise.VISIBLE_MASS_ONLY,
        Premise.LINEAR_IN_VALUES,
        Premise.EXACT_OUTPUT,
    }
)


def _scaled(trial: Trial) -> Trial:
    """Return the trial of the scaled inputs."""
    return trial.noted("power of two", _scale)


def _scale(trial: Trial) -> Trial:
    p = trial.problem
    if trial.entry != "backward":
        return trial.beside("power_of_two", p, inputs=scaled(trial, powers(trial)))
    a, g = exponents(trial)
    inputs, dout = scaled(trial, Powers(a, 0)), times(trial.dout, math.ldexp(1.0, g))
    return trial.beside("power_of_two_backward", p, inputs=inputs, dout=dout)


def judge(trial: Trial) -> Ruling:
    """Run again with Q, K and V scaled.  Compare O bit for bit where it is normal in both runs; if
    runs do not repeat, or an undeclared kernel can have rounded to a short range, check the bound
    of the scaled problem instead.
    """
    p, found = trial.problem, powers(trial)
    other = _scaled(trial)
    ruling = failed(other, other.first)
    if ruling is not None:
        return ruling
    before, after = trial.first, other.first
    assert before.out is not None
    assert after.out is not None
    factor = math.ldexp(1.0, found.values)
    what = f"q 2^{found.keys}, k 2^{-found.keys}, v 2^{found.values}"
    if not trial.declaration.contract.deterministic or (
        trial.declaration.undeclared and p.format.emin > SHORTEST
    ):
        truth = other.truth
        live = ~truth.empty
        bound = truth.out_bound.masked_fill(~live[..., None], math.inf)
        compared = compare(after.out, truth.out, bound, p.format_out)
        return Ruling(excess("power_of_two", "out", after.out, truth.out, bound, compared))
    asked = {"out": normal(before.out, factor, p.format_out)}
    pairs = [("out", times(before.out, factor), after.out)]
    if before.lse is not None and after.lse is not None:
        pairs.append(("lse", before.lse, after.lse))
        asked["lse"] = ~before.lse.isnan()
    return check_same_bits("power_of_two", what, pairs, asked)


def concerns(trial: Trial) -> bool:
    """Return whether anything can be scaled; scaled descales need a comparison of bits, since the
    bounds use the problem's own descales."""
    return bool(powers(trial)) and (
        trial.declaration.contract.deterministic
        or broken(frozenset({Premise.PLAIN_INPUTS}), trial.problem) is None
    )


_FACTOR = 34  # binary exponents that dP - delta can be below 1


def exponents(trial: Trial) -> tuple[int, int]:
    """Return a and g.  V stays, so O and LSE keep their bits.  dS = P (dP - delta) and its products
    with K and Q must be normal numbers in fp32: a and g share the rest of fp32's range."""
    p = trial.problem
    spare = int(powers_left(trial) - _alpha(trial))
    if spare <= 0 or not trial.dout.numel():
        return 0, 0
    a = max(-(spare // 3), min(spare // 3, powers(trial).keys))
    for operand, side in _prescaled(trial):  # prescaled operands must be normal too
        least, most = room(operand, _dtype(trial, _declared(trial).products.operands), False)
        a = side * max(least, min(most, side * a)) if least <= 0 <= most else 0
    low, high = room(trial.dout, p.format_out, False)
    g = chosen((max(low, -(spare // 2)), min(high, spare // 2)), bool(p.seed & 2))
    # If dS is rounded to a format of short range, dO is scaled in every second problem, and then
    # only dV is compared.
    return a, g if _wide_dscores(trial) or p.seed & 4 else 0


def _prescaled(trial: Trial) -> list[tuple[Tensor, int]]:
    """Return the operands that the scale has multiplied, fp64, each with the sign of a in its power
    of two."""
    (q, k, _), scale, declared = (
        trial.expanded,
        trial.problem.scale,
        _declared(trial).products.prescale,
    )
    if declared == "k":
        return [(k.double() * scale * math.log2(math.e), -1)]
    if declared == "alpha":
        return [(q.double() * scale, 1), (k.double() * scale, -1)]
    root = math.sqrt(abs(scale))
    return [(q.double() * root, 1), (k.double() * root, -1)] if declared == "sqrt" else []


def _alpha(trial: Trial) -> float:
    """Binary exponents by which a scale that multiplies dS in fp32 moves it."""
    scale, declared = abs(trial.problem.scale), _declared(trial).products.prescale
    return abs(math.log2(scale)) if scale and declared == "alpha" else 0.0


def powers_left(trial: Trial) -> float:
    """Return the binary exponents of fp32's range that P and dP - delta leave free."""
    return 120 - spread_of_weights(trial) - _FACTOR


def _wide_dscores(trial: Trial) -> bool:
    """Return whether dS and delta have fp32's range."""
    of_scores = _declared(trial).score_gradient
    return not any(_short(_dtype(trial, name)) for name in (of_scores.dtype, of_scores.delta))


def _declared(trial: Trial) -> GradientNumerics:
    declared = trial.declaration.gradients
    assert declared is not None
    return declared


def _dtype(trial: Trial, name: str) -> DType:
    return dtype_named(trial.problem.dtype if name == "input" else name)


def _short(dtype: DType) -> bool:
    """Return whether the range of a dtype is shorter than fp32's."""
    return dtype.emin > dtype_named("float32").emin


def _summed_narrowly(trial: Trial) -> tuple[str, ...]:
    """Return the gradients whose parts are rounded to a short range, in memory or by head: a part
    can be subnormal if the whole is not."""
    sums = _declared(trial).sums
    cast = sums.group == "cast" and trial.problem.group > 1 and _short(trial.problem.format)
    atomics = sums.atomics if _short(_dtype(trial, sums.atomics_dtype)) else ()
    return (*atomics, *(("dk", "dv") if cast else ()))


def judge_backward(trial: Trial) -> Ruling:
    """Run forward and backward scaled; compare gradients where they are normal in both runs."""
    a, g = exponents(trial)
    other = _scaled(trial)
    ruling = failed(other, other.first)
    if ruling is not None:
        return ruling
    saved = [
        (f"saved {name}", tensor, other.saved.outputs[name])
        for name, tensor in trial.saved.outputs.items()
    ]
    what = f"q 2^{a}, k 2^{-a}, dO 2^{g}"
    ruling = check_same_bits("power_of_two_backward", what, saved)
    if ruling.finding is not None:
        return ruling
    powers_of = {"dv": g} | ({"dq": g - a, "dk": g + a} if g == 0 or _wide_dscores(trial) else {})
    pairs: list[tuple[str, Tensor, Tensor]] = []
    asked = {}
    narrow = _summed_narrowly(trial)
    for name, power in powers_of.items():
        if power and name in narrow:
            continue
        before, factor = trial.first.outputs[name], math.ldexp(1.0, power)
        pairs.append((name, times(before, factor), other.first.outputs[name]))
        asked[name] = normal(before, factor, trial.problem.format)
    return check_same_bits("power_of_two_backward", what, pairs, asked)


def excludes_backward(declaration: Declaration) -> str | None:
    """Return the reason why gradients need not scale bit for bit, or None."""
    contract = declaration.contract
    if not (contract.deterministic and contract.deterministic_backward):
        return "declared not deterministic"
    return wide(declaration)


GROUPS = (
    Group(
        name="power_of_two",
        about="inputs times powers of two: results scale bit for bit",
        family="exact",
        distributions=("octaves", "small_integers"),
        adapt=tamed,
    ),
    Group(
        name="power_of_two_backward",
        about="inputs and upstream gradient times powers of two: gradients scale bit for bit",
        entry="backward",
        family="exact",
        distributions=("octaves", "small_integers"),
        adapt=tamed,
    ),
)

FORWARD = Oracle(
    name="power_of_two",
    group="power_of_two",
    catches=(
        "hidden absolute epsilons, clamps, flushes to zero, range checks, narrow intermediates"
    ),
    judge=judge,
    launches=first_of(_scaled),
    excludes=wide,
    needs=_NEEDS,
    concerns=concerns,
)

BACKWARD = Oracle(
    name="power_of_two_backward",
    group="power_of_two_backward",
    catches=(
        "hidden absolute epsilons, clamps, flushes to zero and narrow intermediates in a backward"
    ),
    judge=judge_backward,
    launches=first_of(_scaled),
    excludes=excludes_backward,
    needs=_NEEDS,
    concerns=lambda trial: exponents(trial) != (0, 0),
)

ORACLES = (FORWARD, BACKWARD)
