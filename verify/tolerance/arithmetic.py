"""Declared numerics, resolved for one problem on one arch: the numbers that the bounds of the forward pass read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from verify.arithmetic.dtypes import DTYPES, DType, dtype_named
from verify.arithmetic.instructions import exp_error, tanh_error
from verify.arithmetic.mma import Unit, accumulated, unit_for
from verify.inputs import descales
from verify.problem import Problem
from verify.variant import Config, Numerics

U = 2.0**-24  # unit roundoff of the fp32 arithmetic between the two products
TINY = 2.0**-126  # what flush-to-zero may lose
FP32_MAX = (2 - 2.0**-23) * 2.0**127

_PRESCALE = {"none": 0, "q": 2, "sqrt": 6}  # roundings of one operand and its factor; of both, and a square root


def relative(count: int, u: float) -> float:
    """(1 + u)^count - 1: what `count` roundings of unit roundoff u may add up to."""
    return math.expm1(count * math.log1p(u))


def product_unit(arch: str, operands: str, float32_products: str) -> Unit:
    """The unit that multiplies operands of that dtype; fp32 ones by tf32 only where that is declared, and never on the CPU."""
    by_tf32 = operands == "float32" and float32_products != "ieee" and arch != "cpu"
    return unit_for(arch, float32_products if by_tf32 else operands)


def block_size(declared: int | None, configured: int | None) -> int:
    """Tokens of a block: as declared, else as configured, else 16; 0 means one block of all."""
    return declared if declared is not None else configured or 16


def block_count(length: int, size: int) -> int:
    """Blocks of that size (`block_size`) that hold so many tokens, one at least."""
    return math.ceil(max(length, 1) / size) if size else 1


@dataclass(frozen=True)
class ForwardArithmetic:
    """Declared numerics resolved for one problem on one arch: what the formulas read."""

    scores: Unit
    values: Unit
    prescaled: str  # dtype of operands that the scale has multiplied; "" if it multiplies scores
    operand_roundings: float  # relative error of the product of one Q and one K operand before it is summed
    score_format: DType | None  # what scores are rounded to, before and after they are scaled; None: they stay fp32
    scale_roundings: int  # fp32 roundings in the factor of the scores
    probability: DType
    normalised: bool
    exp: float
    tanh: float
    blocks: int  # n_b
    output: DType
    by_lse: bool = False  # P = exp(S - LSE), with the LSE rounded
    merged: bool = False  # keys are split among programs whose normalised results are merged by their fp32 LSE
    probability_scale: float = 1.0  # s: what an 8-bit P is multiplied by before it is rounded; a power of two
    output_roundings: int = 0
    descale: float = 1.0  # the largest factor of V, and at least 1

    @property
    def flush(self) -> float:
        """eta_P: half the smallest subnormal of P's dtype; fp32 hardware may flush, so nothing under 2**-126 is believed."""
        return max(self.probability.smallest_subnormal / 2 / self.probability_scale, TINY)

    @property
    def probability_roundoff(self) -> float:
        """u_P; P is computed in fp32, so a P that stays fp32 is not rounded once more."""
        return 0.0 if self.probability.precision >= 24 else self.probability.unit_roundoff

    @property
    def offset(self) -> float:
        """ln s: what the exponent holds beside x - m, in a kernel that scales P there."""
        return math.log(self.probability_scale)

    @property
    def saturates(self) -> float:
        """The P from which on an 8-bit P saturates; 0 for wider ones, which do not."""
        return self.probability.max / self.probability_scale if self.probability.itemsize == 1 else 0.0

    @property
    def exps(self) -> float:
        """|ln(1 + eps)| of a key's own exponential and of the rescales that follow its block (and of the merge)."""
        return -(self.blocks + self.merged) * math.log1p(-self.exp)


def resolve(numerics: Numerics, config: Config, problem: Problem, arch: str) -> ForwardArithmetic:
    """Numerics as declared, for this config, problem and arch.  Raises ValueError naming what is unknown or not derived."""
    given = problem.dtype
    operands = given if numerics.operands == "input" else numerics.operands
    probability = given if numerics.probability == "input" else numerics.probability
    _check(numerics, given, operands, probability)
    block_n = block_size(numerics.block_n, config.block_n)
    blocks = block_count(problem.seqlen_kv, block_n)
    scores, values = (product_unit(arch, name, numerics.float32_products) for name in (operands, probability))
    factors = descales(problem)
    return ForwardArithmetic(
        scores=accumulated(scores, numerics.promotion),
        values=accumulated(values, numerics.promotion, block_n, blocks),
        prescaled="" if numerics.prescale == "none" else operands,
        operand_roundings=relative(_PRESCALE[numerics.prescale], dtype_named(operands).unit_roundoff),
        score_format=dtype_named(given) if numerics.scores == "input" and given != "float32" else None,
        scale_roundings=numerics.scale_roundings,
        probability=dtype_named(probability),
        normalised=numerics.normalised,
        by_lse=numerics.normaliser == "lse",
        merged=numerics.split_keys,
        exp=exp_error(numerics.exp),
        tanh=tanh_error(numerics.softcap_tanh) if problem.softcap else 0.0,
        blocks=blocks,
        output=problem.format_out,
        probability_scale=numerics.probability_scale if dtype_named(probability).itemsize == 1 else 1.0,
        output_roundings=numerics.output_roundings,
        descale=max(1.0, float(factors["descale_v"].max())) if factors else 1.0,
    )


def _check(numerics: Numerics, given: str, operands: str, probability: str) -> None:
    """Raise ValueError for what no bound is derived for."""
    eight = dtype_named(given).itemsize == 1
    # What a prescaled operand or a score loses to the short range of an 8-bit format is not derived, nor a product of 8-bit P
    # with a wider V, which no unit has.
    for name, value, possible in (
        ("accumulator", numerics.accumulator, ("float32",)),
        ("prescale", numerics.prescale, tuple(_PRESCALE) if dtype_named(operands).itemsize > 1 else ("none",)),
        ("scores", numerics.scores, ("float32",) if eight else ("float32", "input")),
        ("float32_products", numerics.float32_products, ("ieee", "tf32", "tf32x3")),
        ("normaliser", numerics.normaliser, ("sum", "lse")),
        ("probability", probability, tuple(name for name, dtype in DTYPES.items() if eight or dtype.itemsize > 1)),
    ):
        if value not in possible:
            raise ValueError(f"numerics.{name}: no bound is derived for {value!r}, only for {', '.join(possible)}")
    if math.frexp(numerics.probability_scale)[0] != 0.5:
        raise ValueError(f"numerics.probability_scale: no bound is derived for {numerics.probability_scale}, no power of two")


# The tightest arithmetic of an honest kernel, everything between the inputs and O in fp32 or promoted to it: what bounds are
# printed beside.
BEST = Numerics(probability="float32", block_n=0, promotion=32)
