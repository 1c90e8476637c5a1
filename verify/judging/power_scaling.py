"""Powers of two that can multiply inputs without an additional rounding in inputs or kernel.

A kernel computes in fp32 between inputs and outputs.  If nothing underflows or overflows there, or
in the dtypes of the inputs and P, the rounding of a scaled number is the scaled rounding.  So
results must scale bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verify.arithmetic.dtypes import DType, dtype_named
from verify.judging.trial import Trial
from verify.problem import Problem
from verify.problem.inputs import Inputs
from verify.tolerance.resolution import resolve
from verify.variant import Declaration, Support

_SAFE = 120  # largest binary exponent of products and sums, inside fp32's range
_MOST = 40  # larger powers show nothing more
_FLOAT32 = dtype_named("float32")
SHORTEST = _FLOAT32.emin  # a format with a greater least exponent has a short range
_LEAST_COMPARED = -80  # binary exponent; a flush can change a bit of a smaller result


@dataclass(frozen=True)
class Powers:
    """q is multiplied by 2^keys, k by 2^-keys and v by 2^values; or their factors are."""

    keys: int
    values: int

    def __bool__(self) -> bool:
        return self.keys != 0 or self.values != 0


def tamed(problem: Problem, support: Support) -> Problem:
    """The problem with a scale of at most head_dim ** -0.5, so that no weight is far below the
    largest."""
    if abs(problem.scale) <= problem.head_dim**-0.5:
        return problem
    return problem.but(softmax_scale=math.copysign(problem.head_dim**-0.5, problem.scale))


def spread_of_weights(trial: Trial) -> float:
    """log2 of how far a weight can lie below the row's largest: 2 |scale| |q| |k| log2(e), from the
    largest norms."""
    q, k, _ = trial.expanded
    norms = [float(x.double().norm(dim=-1).max()) if x.numel() else 0.0 for x in (q, k)]
    reach = abs(trial.problem.scale) * norms[0] * norms[1] * math.log2(math.e)
    numerics = trial.declaration.numerics
    return 2 * reach + 1 + numerics.softmax.maximum.excess + numerics.softmax.maximum.step * reach


def powers(trial: Trial) -> Powers:
    """The powers farthest from 0 that the problem allows, upwards or downwards by its seed; 0 if no
    other is exact.  Computed once."""
    return trial.noted("powers", _powers)


def _powers(trial: Trial) -> Powers:
    p, numerics = trial.problem, trial.declaration.numerics
    inputs, down = trial.inputs, bool(p.seed & 1)
    spare = _SAFE - spread_of_weights(trial)
    if not (inputs.q.numel() and inputs.k.numel()) or spare <= 0:
        return Powers(0, 0)
    low, high = room(inputs.v, p.format, p.quantisation.scaled)
    arithmetic = resolve(numerics, trial.config, p, trial.arch)
    if arithmetic.conversion is not None:  # V must be normal in P's format too
        own = room(trial.expanded[2], arithmetic.probability, False)
        low, high = max(low, own[0]), min(high, own[1])
    least, most = _exponents(trial.expanded[2])
    # P V stays between 2^-_SAFE and 2^_SAFE, also for sums of all keys and a scaled P; O stays in
    # its format.
    largest_sum = most + math.ceil(math.log2(p.seqlen_kv)) + 8
    out_low, out_high = p.format_out.emin - most, math.frexp(p.format_out.max)[1] - 1 - most
    values = (
        max(low, math.ceil(-spare) - least, out_low),
        min(high, _SAFE - largest_sum, out_high),
    )
    if arithmetic.partial is not None and arithmetic.partial.emin > SHORTEST:
        values = 0, 0  # a part of a normal O can be subnormal
    factor = {"none": 1.0, "q": abs(p.scale), "sqrt": math.sqrt(abs(p.scale))}[
        numerics.products.prescale
    ] or 1.0
    ranges = [room(x, p.format, p.quantisation.scaled) for x in (inputs.q, inputs.k)]
    # products with the scale must be normal too: operands, or their factors in fp32
    if arithmetic.prescaled:
        kept = dtype_named(arithmetic.prescaled)
        ranges += [room(x.double() * factor, kept, False) for x in (inputs.q, inputs.k)]
    if p.quantisation.scaled:
        factors = (inputs.others[f"descale_{name}"] for name in "qk")
        ranges += [room(x.double() * abs(p.scale), _FLOAT32, False) for x in factors]
    ranges += [(-_MOST, _MOST)]
    lows, highs = [r[0] for r in ranges], [r[1] for r in ranges]
    # q and k are scaled in opposite directions.
    keys = (max(*lows[::2], -min(highs[1::2])), min(*highs[::2], -max(lows[1::2])))
    return Powers(chosen(keys, down), chosen(values, not down))


def chosen(bounds: tuple[int, int], down: bool) -> int:
    """The lower (`down`) or the upper bound, at most _MOST in size; the other one if that is 0; 0
    if 0 lies outside the bounds."""
    low, high = max(bounds[0], -_MOST), min(bounds[1], _MOST)
    if low > 0 or high < 0:
        return 0
    return (low or high) if down else (high or low)


def _exponents(tensor: Tensor) -> tuple[int, int]:
    """Least and greatest binary exponent of the finite elements that are not 0; (0, 0) if there are
    none."""
    sizes = tensor.double().abs()
    sizes = sizes[(sizes > 0) & sizes.isfinite()]
    return (
        (math.frexp(float(sizes.min()))[1] - 1, math.frexp(float(sizes.max()))[1] - 1)
        if sizes.numel()
        else (0, 0)
    )


def room(stored: Tensor, dtype: DType, by_factor: bool) -> tuple[int, int]:
    """The least and greatest power of two that keep every nonzero element of `stored` a normal
    number of that dtype."""
    if by_factor:
        return -_MOST, _MOST
    least, most = _exponents(stored)
    return dtype.emin - least, math.frexp(dtype.max)[1] - 2 - most


def scaled(trial: Trial, found: Powers) -> Inputs:
    """The trial's inputs times these powers; if they have factors, these are scaled instead."""
    inputs = trial.inputs
    factors = {
        "q": math.ldexp(1.0, found.keys),
        "k": math.ldexp(1.0, -found.keys),
        "v": math.ldexp(1.0, found.values),
    }
    if trial.problem.quantisation.scaled:
        return replace(
            inputs, others={name: x * factors[name[-1]] for name, x in inputs.others.items()}
        )
    q, k, v = (times(getattr(inputs, name), factor) for name, factor in factors.items())
    return Inputs(q, k, v, inputs.others)


def times(tensor: Tensor, factor: float) -> Tensor:
    """The product in the tensor's dtype, exact if it is a normal number."""
    return (tensor.double() * factor).to(tensor.dtype)


def normal(tensor: Tensor, factor: float, dtype: DType) -> Tensor:
    """Mask of results that are, also times `factor`, normal numbers of that dtype and were before
    rounding.

    The smallest normal number is excluded: a subnormal value, with one bit less, can round to it.
    """
    sizes = torch.stack([tensor.double().abs(), tensor.double().abs() * factor])
    return ((sizes > math.ldexp(1.0, max(dtype.emin, _LEAST_COMPARED))) & (sizes <= dtype.max)).all(
        0
    )


def wide(declaration: Declaration) -> str | None:
    """Why powers of two cannot test a kernel (it accumulates in a format of short range), or
    None."""
    accumulator = declaration.numerics.products.accumulator
    return (
        None
        if dtype_named(accumulator).emin <= SHORTEST
        else f"accumulates in {accumulator}, whose range is short"
    )
