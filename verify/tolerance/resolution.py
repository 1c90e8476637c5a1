"""Declared numerics of a forward, resolved for one problem, config and arch; and what of it a
backward shares."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from references.premises import Premise
from verify.arithmetic.archs import arch_named
from verify.arithmetic.dtypes import DType, dtype_named
from verify.arithmetic.instructions import DIVISION, EXP, Function, tanh_error
from verify.arithmetic.mma import (
    NearestChain,
    Unit,
    accumulated,
    bfloat16_blocks,
    declared_unit,
    provenance,
)
from verify.problem import Problem
from verify.problem.inputs import stored_factors
from verify.tolerance.arithmetic import (
    ANY_DIVISION,
    TINY,
    Conversion,
    ForwardArithmetic,
    U,
    relative,
)
from verify.tolerance.derived import check_derived, other_half
from verify.tolerance.integers import check_declared, columns_of, integers_of
from verify.tolerance.subnormals import Operands, Weighted
from verify.variant import Config, Numerics, Output, Products, Softmax

_LARGEST_BIAS = 2.0**64  # far less than half a last place of fp32's largest number

# Roundings of the product of a Q and a K that the scale has multiplied: of one and its factor; of
# both, and a square root.
PRESCALE_ROUNDINGS = {"none": 0, "q": 2, "k": 2, "alpha": 2, "sqrt": 6}


def product_unit(
    arch: str,
    operands: str,
    float32_products: str,
    accumulator: str = "float32",
    instruction: str = "any",
) -> Unit:
    """The unit that multiplies operands of that dtype; fp32 ones by tf32 only where that is
    declared.

    On a CPU, where the interpreter drops tf32's bits, three products of tf32 are one of fp32.
    """
    kind = multiplied_as(arch, operands, float32_products)
    return declared_unit(arch, kind, accumulator, instruction)


def multiplied_as(arch: str, operands: str, float32_products: str) -> str:
    """What the unit multiplies: the operands' dtype, or how fp32 is multiplied."""
    exact = "tf32x3" if arch == "cpu" else "ieee"
    by_tf32 = operands == "float32" and float32_products not in ("ieee", exact)
    return float32_products if by_tf32 else operands


def prescaled_by(prescale: str, scale: float) -> tuple[float, float]:
    """What the scale multiplies Q and K by beforehand, signs and log2 e left out; a scale of 0
    counts as 1."""
    size = abs(scale) or 1.0
    root = math.sqrt(size)
    by = {"q": (size, 1.0), "k": (1.0, size), "alpha": (1.0, size), "sqrt": (root, root)}
    return by.get(prescale, (1.0, 1.0))


def block_size(declared: int | None, configured: int | None) -> int:
    """Tokens of a block: as declared, else as configured, else 16; 0 means one block of all."""
    return declared if declared is not None else configured or 16


def block_count(length: int, size: int) -> int:
    """Blocks of that size (`block_size`) that hold so many tokens, one at least."""
    return math.ceil(max(length, 1) / size) if size else 1


# The oracles of one case ask the same again, and cases that are judged beside each other in turn.
_Asked = tuple[Numerics, Config, Problem, str]
_RECENT: OrderedDict[tuple[int, ...], tuple[_Asked, ForwardArithmetic]] = OrderedDict()
_MOST_RECENT = 128


def resolve(numerics: Numerics, config: Config, problem: Problem, arch: str) -> ForwardArithmetic:
    """Numerics as declared, for this config, problem and arch.  Raises ValueError naming what is
    unknown or not derived."""
    # Of a problem's values, only its factors matter.
    given = problem if problem.quantisation.scaled else problem.plain_valued
    asked = (numerics, config, given, arch)
    key = tuple(map(id, asked))  # of objects that an entry keeps alive
    known = _RECENT.get(key)
    if known is not None:
        return known[1]
    found = _resolved(*asked)
    _RECENT[key] = asked, found
    while len(_RECENT) > _MOST_RECENT:
        _RECENT.popitem(last=False)
    return found


def _resolved(numerics: Numerics, config: Config, problem: Problem, arch: str) -> ForwardArithmetic:
    given = problem.dtype
    products, softmax, output = numerics.products, numerics.softmax, numerics.output
    operands = given if products.operands == "input" else products.operands
    probability = given if output.probability == "input" else output.probability
    check_derived(numerics, given, operands, probability)
    check_declared(numerics, problem)
    if Premise.FACTORS_BY_ROW in problem.quantisation.breaks:
        said = f"no bound is derived for {problem.quantisation.label}"
        raise ValueError(f"problem.quantisation: {said}")
    other = other_half(given, probability)
    # The format of P and V as the unit sees them.
    multiplied = "float32" if other and output.values == "input" else probability
    block_n = block_size(softmax.block_n, config.block_n)
    blocks = block_count(problem.seqlen_kv, block_n)
    scores, values = (
        product_unit(arch, name, products.float32_products, accumulator, products.instruction)
        for name, accumulator in (
            (operands, products.score_accumulator or products.accumulator),
            (multiplied, products.accumulator),
        )
    )
    if products.accumulator_rounded == "block":
        lengths = (problem.head_dim, block_n or problem.seqlen_kv)
        scores = _by_block(scores, lengths[0])
        values = _by_block(values, lengths[1])
    lanes, apart = softmax.row_sum.lanes, softmax.row_sum.apart
    keys = block_n or max(problem.seqlen_kv, 1)
    factors = {name[-1]: factor for name, factor in stored_factors(problem).items()}
    largest = {name: float(factors[name].max()) if factors else 1.0 for name in "qkv"}
    of_scores, of_values = products.promotions(keys)
    scores = accumulated(scores, of_scores)
    of_factor = problem.quantisation.keys
    parts = block_count(problem.seqlen_kv, of_factor) if of_factor else 0
    values = accumulated(values, of_values, block_n, blocks + parts)
    wide = dtype_named(probability).itemsize > 1
    probability_scale = 1.0 if wide else output.probability_scale
    probability_scale = numerics.quantised.probability_top or probability_scale
    return ForwardArithmetic(
        scores=scores,
        values=values,
        operands=_operands(numerics, problem, dtype_named(operands), scores, largest),
        weighted=Weighted(
            values,
            dtype_named(multiplied),
            dtype_named(multiplied if wide or numerics.quantised.value_top else given),
            problem.seqlen_kv,
            multiplied=1 / largest["v"],
        ),
        prescaled="" if products.prescale == "none" else operands,
        operand_roundings=_operand_roundings(numerics, dtype_named(operands)),
        score_format=(
            dtype_named(given) if softmax.scores == "input" and given != "float32" else None
        ),
        scale_roundings=softmax.scale_roundings,
        probability=dtype_named(probability),
        normalised=output.normalised,
        by_lse=output.normaliser == "lse",
        merged=bool(output.split_keys),
        partial=_partial(output.split_keys, given),
        exponential=exponential(softmax.exp),
        rescale=exponential(softmax.rescale_exp or softmax.exp),
        function=function_error(problem, softmax.softcap_tanh, softmax.scores),
        blocks=blocks,
        output=problem.format_out,
        probability_scale=probability_scale,
        output_roundings=output.roundings,
        largest_factor=max(1.0, largest["v"]),
        least_factors=_least_factors(problem, factors),
        most_factor=max(1.0, largest["q"]) * max(1.0, largest["k"]),
        parts=parts,
        lag=softmax.maximum.lag * math.log(2),
        row_sum=softmax.row_sum.of,
        chain=math.ceil(keys / lanes) if apart or lanes > 1 else 0,
        joins=lanes - 1,
        running=not apart,
        division=_division(output.division),
        conversion=_conversion(given, multiplied) if other else None,
        maximum_rows=block_size(softmax.maximum.rows, config.block_m) or max(problem.seqlen_q, 1),
        excess=softmax.maximum.excess * math.log(2),
        step=softmax.maximum.step,
        in_order=(
            numerics.order.head_dim == "ascending"
            and has_order(scores, arch, multiplied_as(arch, operands, products.float32_products))
        ),
        key_order=softmax.maximum.key_order,
        block_n=block_n,
        tile=config.block_m or 0,
        key_parts=_key_parts(softmax.maximum.parts, config),
        integers=integers_of(
            numerics.quantised,
            (
                block_size(numerics.quantised.query_tile, config.block_m),
                block_size(numerics.quantised.key_tile, config.block_n),
            ),
            problem,
        ),
        columns=columns_of(numerics.quantised, dtype_named(probability)),
        # Where Q and K become integers, the errors of the maximum are not those of a product.
        log2_sum=(
            softmax.row_sum.lse == "log2"
            and not output.split_keys
            and numerics.quantised.products == "none"
        ),
    )


def has_order(unit: Unit, arch: str, multiplied: str) -> bool:
    """Whether a bound is derived for products that the unit adds in order: one whose groups are
    known, or fp32 sums of a GPU's scalar units.  Libraries for CPUs add as they like."""
    if not arch_named(arch).instructions or unit.accumulator != "float32":
        return False
    if provenance(arch, multiplied).guess:
        return False
    return (type(unit) is Unit and unit.rounding == "zero") or type(unit) is NearestChain


def _least_factors(problem: Problem, factors: Mapping[str, Tensor]) -> tuple[float, float]:
    """The least that the factors of Q and K multiply a score by, and those of V; 1 without them."""
    if not factors:
        return 1.0, 1.0
    q, k, v = (factors[name] for name in "qkv")
    if Premise.FACTORS_BY_HEAD in problem.quantisation.breaks:
        q, k = q.min(), k.min()
    return float((q * k).min()), float(v.min())


def function_error(problem: Problem, tanh: str, scores: str = "float32") -> float:
    """Relative error of the elementary function that a problem's score mod takes, 0 for none; a
    kernel has this tanh and keeps its scores in fp32, or in the "input" dtype.

    Raises ValueError where no bound is derived.
    """
    mod = problem.score_mod
    if mod is None:
        return 0.0
    added = float(mod.reach(problem.extent, torch.zeros((), dtype=torch.float64)))
    if mod.steepest > 1 or added >= _LARGEST_BIAS:
        # Where scores overflow is derived of scaled scores, before the score mod.
        raise ValueError(
            f"score_mod: no bound is derived for {mod.name}, which is steeper than 1 or adds"
            f" {_LARGEST_BIAS:.3g} to a score"
        )
    roundings = mod.roundings(problem.extent)
    for each in roundings:
        if each.function not in ("", "tanh"):
            raise ValueError(f"score_mod: no error is known for the function {each.function!r}")
        if each.narrow is None and scores == "input" and problem.dtype != "float32":
            raise ValueError(
                f"numerics.softmax.scores: no bound is derived for {scores!r} beside {mod.label}"
            )
    return tanh_error(tanh) if any(each.function for each in roundings) else 0.0


def _key_parts(declared: int | None, config: Config) -> int:
    """Parts of the keys: as declared, else the config's option; 0 where they are not known."""
    if declared is not None:
        return declared
    split = dict(config.options).get("split", 0)
    return split if isinstance(split, int) and split > 0 else 0


def _partial(split_keys: bool | str, given: str) -> DType | None:
    """The 16 bits that the O of a part is rounded to; None if it stays fp32."""
    return dtype_named(given) if split_keys == "input" and given != "float32" else None


def _operand_roundings(numerics: Numerics, operands: DType) -> float:
    return relative(PRESCALE_ROUNDINGS[numerics.products.prescale], operands.unit_roundoff)


def _operands(
    numerics: Numerics, problem: Problem, dtype: DType, unit: Unit, factors: dict[str, float]
) -> Operands:
    """Q and K as they are multiplied, by the largest of their factors."""
    prescaled = numerics.products.prescale != "none"
    by_q, by_k = prescaled_by(numerics.products.prescale, problem.scale)
    return Operands(
        unit,
        dtype,
        query=factors["q"] / by_q,
        key=factors["k"] / by_k,
        error=_operand_roundings(numerics, dtype),
        lost=max(unit.flush, max(dtype.smallest_subnormal / 2, TINY) if prescaled else 0.0),
    )


def _division(name: str) -> int:
    """Roundings of `U` in a quotient: of the division, or of the reciprocal and the product with
    it."""
    if name == "any":
        return ANY_DIVISION
    return round(DIVISION[name].error / U) + name.startswith("rcp")


def exponential(name: str) -> Function:
    """The named exponential; raises ValueError that lists those that are known."""
    if name not in EXP:
        raise ValueError(f"numerics.softmax.exp: {name!r} is none of {', '.join(EXP)}")
    return EXP[name]


def _by_block(unit: Unit, products: int) -> Unit:
    """The unit where sums kept in bfloat16 are rounded once in so many products."""
    if unit.accumulator != "bfloat16":
        return unit
    return replace(bfloat16_blocks(max(products, 1)), flush=unit.flush)


def _conversion(given: str, multiplied: str) -> Conversion | None:
    if dtype_named(multiplied).holds(dtype_named(given)):
        return None
    return Conversion.between(dtype_named(given), dtype_named(multiplied))


# The tightest arithmetic of an honest kernel, everything between the inputs and O in fp32 or
# promoted to it: what bounds are printed beside.
BEST = Numerics(
    products=Products(promotion=32),
    softmax=Softmax(block_n=0),
    output=Output(probability="float32"),
)
