"""How a backward computes: its declared numerics resolved for one problem, config and arch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from references.masks import Full
from verify.arithmetic.dtypes import DType, dtype_named
from verify.arithmetic.instructions import Function
from verify.arithmetic.mma import Unit
from verify.problem import Problem
from verify.tolerance.arithmetic import TINY, relative
from verify.tolerance.derived import holding
from verify.tolerance.resolution import (
    PRESCALE_ROUNDINGS,
    block_count,
    block_size,
    exponential,
    function_error,
    has_order,
    multiplied_as,
    prescaled_by,
    product_unit,
)
from verify.tolerance.subnormals import Operands
from verify.variant import Config, GradientNumerics, GradientSoftmax, GradientSums, ScoreGradient

# What enters the products as their first operand, by the path that declares it.
_PRODUCTS = ("products.operands", "softmax.probability", "score_gradient.dtype")
_DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class GradientArithmetic:
    """Declared numerics resolved for one problem on one arch: what the formulas read."""

    scores: Unit  # multiplies Q K^T and dO V^T
    weights: Unit  # multiplies P^T dO
    score_gradients: Unit  # multiplies dS K and dS^T Q
    operands: Operands  # Q and K
    factors: Operands  # dO and V
    scale_roundings: int  # fp32 roundings in the factor of the scores
    exponential: Function
    function: float  # relative error of the elementary function of a score mod
    probability: DType
    score_gradient: DType
    blocks_m: int  # partial sums of dK and dV in one query head
    blocks_n: int  # partial sums of dQ
    # each query head's dK and dV are rounded to the output's dtype before a group is summed
    cast: bool
    gradient_roundings: int  # fp32 roundings of the finished sums, that by the scale included
    output: DType
    rounded: bool = False  # dS is made of the rounded P
    own: bool = False  # P is a softmax of the backward's own, and D the sum of P dP
    of_weights: bool = False  # D is the sum of P dP, of a P from the saved LSE
    # relative error of K, which the scale has multiplied; of K and Q together, if it has both
    prescaled: float = 0.0
    both: bool = False  # the scale's root has multiplied Q and K
    # what K, or Q, may lose then below the normal range, times (the rest of) the scale
    coarse: float = 0.0
    overscaled: float = 0.0  # the |K|, or |Q|, from which on that may overflow; 0: none does
    alpha: float = 0.0  # |s|, if that can multiply Q, K or dS in fp32 for dQ and dK; 0: it cannot
    delta: DType | None = None  # what D is rounded to; None: it stays fp32
    factor: float = 1.0  # what dS is multiplied by before it is rounded, its size
    memory: DType | None = None  # 16 bits in which partial sums of `atomics` are added up
    atomics: tuple[str, ...] = ()
    # 16 bits that everything between the products may be rounded to, in a kernel whose arithmetic
    # is unknown (`gradients_unknown`)
    narrow: DType | None = None
    # False: where gradients lie before their last rounding is not asked
    intervals: bool = True
    in_order: bool = False  # Q K^T and dO V^T add their products in the order of head_dim
    # of the keys of dQ and of the rows of dK and dV: "any", "ascending", "whole_first"
    key_order: str = "any"
    row_order: str = "any"

    @property
    def exp(self) -> float:
        """eps: relative error of the exponential, at 0."""
        return self.exponential.error

    @property
    def sums_delta(self) -> bool:
        """Whether D is the sum of P dP, over all keys of a row."""
        return self.own or self.of_weights

    @property
    def _asked(self) -> bool:
        return self.intervals and self.narrow is None

    @property
    def knows_p(self) -> bool:
        """Whether P is rounded once, from a number that is known nearly to fp32's precision."""
        return self._asked and self.probability.precision < 24

    @property
    def knows_ds(self) -> bool:
        """The same of dS, or of the P that it is made of."""
        own = self._asked and self.score_gradient.precision < 24
        return own or (self.rounded and self.knows_p)

    @property
    def known_roundings(self) -> tuple[str, ...]:
        """The gradients of weights whose roundings are known."""
        return ("dq", "dk") * self.knows_ds + ("dv",) * self.knows_p

    def order_of(self, name: str) -> str:
        """Of the terms of "dq", "dk" or "dv"."""
        if name in self.atomics:
            return "any"
        return self.key_order if name == "dq" else self.row_order

    def narrowing(self, times: int) -> float:
        """Relative error of so many roundings to `narrow`; 0 without it."""
        return relative(times, self.narrow.unit_roundoff) if self.narrow else 0.0

    def overscales(self, q: Tensor, k: Tensor) -> bool:
        """Whether some operand times the scale may overflow, so that nothing is asked."""
        multiplied = (q, k) if self.both or self.alpha else (k,)
        return bool(self.overscaled) and any(
            x.numel() and float(x.abs().max()) >= self.overscaled for x in multiplied
        )


# The tightest arithmetic of an honest backward, everything between inputs and outputs in fp32: what
# bounds are printed beside.
BEST = GradientNumerics(
    softmax=GradientSoftmax(probability="float32"),
    score_gradient=ScoreGradient(dtype="float32"),
    sums=GradientSums(block_m=0, block_n=0),
)


def resolve(
    numerics: GradientNumerics, config: Config, problem: Problem, arch: str
) -> GradientArithmetic:
    """Numerics as declared, for this config, problem and arch.  Raises ValueError naming what is
    unknown or not derived."""
    given = problem.dtype
    products, softmax = numerics.products, numerics.softmax
    of_scores, sums = numerics.score_gradient, numerics.sums
    named = {
        "products.operands": products.operands,
        "softmax.probability": softmax.probability,
        "score_gradient.dtype": of_scores.dtype,
        "score_gradient.delta": of_scores.delta,
        "sums.atomics_dtype": sums.atomics_dtype,
    }
    used = {name: given if value == "input" else value for name, value in named.items()}
    asked: list[tuple[str, str, tuple[str, ...]]] = [
        ("problem.dtype", given, _DTYPES),
        ("problem.dtype_out", problem.dtype_out, (given,)),
        ("problem.descaling", problem.descaling, ("none",)),
        *((f"gradients.{name}", value, _DTYPES) for name, value in used.items()),
    ]
    if given in _DTYPES:
        # What an operand loses in a narrower format is not derived, and no unit multiplies two
        # formats of 16 bits.
        wide = tuple(name for name in holding(given) if name in _DTYPES)
        asked += [(f"gradients.{name}", used[name], wide) for name in _PRODUCTS]
    for name, value, possible in asked:
        if value not in possible:
            raise ValueError(
                f"{name}: no bound of gradients is derived for {value!r}, only for"
                f" {', '.join(possible)}"
            )
    units = {}
    for name in _PRODUCTS:
        first = name == "products.operands"
        accumulator = (first and products.score_accumulator) or products.accumulator
        by = products.float32_products
        if accumulator != "float32" and used[name] == "float32" and by != "ieee":
            raise ValueError(
                "gradients.products.float32_products: no bound of gradients is derived for"
                f" {by!r} into {accumulator}"
            )
        units[name] = product_unit(arch, used[name], by, accumulator, products.instruction)
    multiplies, weighs, derives = (units[name] for name in _PRODUCTS)
    operands, (by_q, by_k) = (
        dtype_named(used["products.operands"]),
        prescaled_by(products.prescale, problem.scale),
    )
    ordered = {
        name: has_order(unit, arch, multiplied_as(arch, used[name], products.float32_products))
        for name, unit in units.items()
    }
    blocks_m = block_count(problem.seqlen_q, block_size(sums.block_m, config.block_m))
    blocks_n = block_count(problem.seqlen_kv, block_size(sums.block_n, config.block_n))
    derived = ordered["score_gradient.dtype"], ordered["softmax.probability"]
    prescaled, both = products.prescale != "none", products.prescale == "sqrt"
    largest = abs(problem.scale) * math.log2(math.e) if products.prescale == "k" else by_k
    error = relative(PRESCALE_ROUNDINGS[products.prescale], operands.unit_roundoff)
    flushed = max(operands.smallest_subnormal / 2, TINY)
    of_factors = Operands(multiplies, operands, lost=multiplies.flush)
    multiplied = replace(of_factors, query=1 / by_q, key=1 / by_k, error=error)
    if both:
        multiplied = replace(multiplied, lost=max(of_factors.lost, flushed))
    return GradientArithmetic(
        scores=multiplies,
        operands=multiplied,
        factors=of_factors,
        weights=weighs,
        score_gradients=derives,
        scale_roundings=softmax.scale_roundings,
        exponential=exponential(softmax.exp),
        function=function_error(problem, softmax.softcap_tanh),
        probability=dtype_named(used["softmax.probability"]),
        score_gradient=dtype_named(used["score_gradient.dtype"]),
        blocks_m=blocks_m,
        blocks_n=blocks_n,
        cast=sums.group == "cast" and problem.group > 1,
        gradient_roundings=sums.roundings,
        output=dtype_named(given),
        rounded=of_scores.of == "rounded",
        own=softmax.source == "own",
        of_weights=softmax.source == "saved" and of_scores.delta_of == "weights",
        prescaled=error,
        both=both,
        coarse=(flushed + TINY) * (by_k if both else 1.0) if prescaled else 0.0,
        overscaled=operands.overflow / largest if largest > 1 else 0.0,
        alpha=abs(problem.scale) if products.prescale == "alpha" else 0.0,
        delta=_narrow(used["score_gradient.delta"]),
        factor=abs(problem.scale) if of_scores.scaled and problem.scale else 1.0,
        memory=_narrow(used["sums.atomics_dtype"]),
        atomics=sums.atomics,
        in_order=numerics.order.head_dim == "ascending" and ordered["products.operands"],
        key_order=_order(numerics.order.keys, problem, blocks_n == 1 and derived[0]),
        row_order=_order(numerics.order.rows, problem, blocks_m == 1 and all(derived)),
    )


def _order(declared: str, problem: Problem, derived: bool) -> str:
    """The order of the terms of a sum that runs through all blocks; "any" where nothing follows
    from it."""
    if not derived:
        return "any"
    # Without a mask a tile sees all blocks whole, but the last one where it is not full.
    whole_first = declared == "whole_first" and isinstance(problem.mask, Full)
    return "ascending" if whole_first else declared


def _narrow(name: str) -> DType | None:
    return None if name == "float32" else dtype_named(name)
