"""How a backward computes: its declared numerics resolved for one problem, config and arch."""

from __future__ import annotations

from dataclasses import dataclass

from verify.arithmetic.dtypes import DType, dtype_named
from verify.arithmetic.instructions import exp_error, tanh_error
from verify.arithmetic.mma import Unit
from verify.problem import Problem
from verify.tolerance.arithmetic import block_count, block_size, product_unit
from verify.variant import Config, GradientNumerics

_DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class GradientArithmetic:
    """Declared numerics resolved for one problem on one arch: what the formulas read."""

    scores: Unit  # multiplies Q K^T and dO V^T
    weights: Unit  # multiplies P^T dO
    score_gradients: Unit  # multiplies dS K and dS^T Q
    scale_roundings: int  # fp32 roundings in the factor of the scores
    exp: float
    tanh: float
    probability: DType
    score_gradient: DType
    blocks_m: int  # partial sums of dK and dV in one query head
    blocks_n: int  # partial sums of dQ
    cast: bool  # each query head's dK and dV are rounded to the output's dtype before a group is summed
    gradient_roundings: int  # fp32 roundings of the finished sums, that by the scale included
    output: DType


# The tightest arithmetic of an honest backward, everything between inputs and outputs in fp32: what bounds are printed beside.
BEST = GradientNumerics(probability="float32", score_gradient="float32", block_m=0, block_n=0)


def resolve(numerics: GradientNumerics, config: Config, problem: Problem, arch: str) -> GradientArithmetic:
    """Numerics as declared, for this config, problem and arch.  Raises ValueError naming what is unknown or not derived."""
    given = problem.dtype
    named = {name: getattr(numerics, name) for name in ("operands", "probability", "score_gradient")}
    used = {name: given if value == "input" else value for name, value in named.items()}
    asked: list[tuple[str, str, tuple[str, ...]]] = [
        ("problem.dtype", given, _DTYPES),
        ("problem.dtype_out", problem.dtype_out, (given,)),
        ("problem.descaling", problem.descaling, ("none",)),
        ("gradients.float32_products", numerics.float32_products, ("ieee", "tf32", "tf32x3")),
        ("gradients.group", numerics.group, ("float32", "cast")),
        *(("gradients.atomics", name, ("dq", "dk", "dv")) for name in numerics.atomics),
        *((f"gradients.{name}", value, _DTYPES) for name, value in used.items()),
    ]
    for name, value, possible in asked:
        if value not in possible:
            raise ValueError(f"{name}: no bound of gradients is derived for {value!r}, only for {', '.join(possible)}")
    units = {name: product_unit(arch, value, numerics.float32_products) for name, value in used.items()}
    return GradientArithmetic(
        scores=units["operands"],
        weights=units["probability"],
        score_gradients=units["score_gradient"],
        scale_roundings=numerics.scale_roundings,
        exp=exp_error(numerics.exp),
        tanh=tanh_error(numerics.softcap_tanh) if problem.softcap else 0.0,
        probability=dtype_named(used["probability"]),
        score_gradient=dtype_named(used["score_gradient"]),
        blocks_m=block_count(problem.seqlen_q, block_size(numerics.block_m, config.block_m)),
        blocks_n=block_count(problem.seqlen_kv, block_size(numerics.block_n, config.block_n)),
        cast=numerics.group == "cast" and problem.group > 1,
        gradient_roundings=numerics.gradient_roundings,
        output=dtype_named(given),
    )
