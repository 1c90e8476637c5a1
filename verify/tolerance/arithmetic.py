"""The numbers that the bounds of the forward pass read, made by `verify.tolerance.resolution`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from verify.arithmetic.dtypes import DTYPES, DType
from verify.arithmetic.instructions import Function
from verify.arithmetic.mma import Promoted, Unit
from verify.tolerance.subnormals import Operands, Weighted

U = 2.0**-24  # unit roundoff of the fp32 arithmetic between the two products
TINY = 2.0**-126  # what flush-to-zero may lose
FP32_MAX = (2 - 2.0**-23) * 2.0**127
# roundings of `U`: div.full and div.approx err by 2 ulp, a reciprocal of 2 ulp is multiplied
ANY_DIVISION = 5


def relative(count: int, u: float) -> float:
    """(1 + u)^count - 1: what `count` roundings of unit roundoff u may add up to."""
    return math.expm1(count * math.log1p(u))


@dataclass(frozen=True)
class Conversion:
    """V converted to nearest to a format that does not hold every number of the inputs'.

    roundoff: relative error.  lost: what an element may lose besides where one of its column is
    below `normal`.  limit: the |V| from which on it becomes infinite.
    """

    roundoff: float
    lost: float
    normal: float
    limit: float

    @staticmethod
    def between(given: DType, made: DType) -> Conversion:
        """From one format to another."""
        coarser = made.smallest_subnormal > given.smallest_subnormal
        return Conversion(
            roundoff=made.unit_roundoff if made.precision < given.precision else 0.0,
            lost=made.smallest_subnormal / 2 if coarser else 0.0,
            normal=2.0**made.emin if coarser else 0.0,
            limit=made.overflow if made.max < given.max else math.inf,
        )


@dataclass(frozen=True)
class Integers:
    """Q and K rounded to 8-bit integers by factors of tiles of rows (0: of all rows).

    query_floor, key_floor: what a factor may be larger by than the largest |x| / 127.  query_unit:
    what multiplies Q before that, at least.  kept: of the mean of K that is subtracted; None: none
    is.
    """

    query_tile: int
    key_tile: int
    query_floor: float
    key_floor: float
    query_unit: float
    kept: DType | None


@dataclass(frozen=True)
class Columns:
    """V rounded to 8 bits by a factor for each column, which takes its largest |V| to `top`."""

    top: float
    format: DType


@dataclass(frozen=True)
class ForwardArithmetic:
    """Declared numerics resolved for one problem on one arch: what the formulas read."""

    scores: Unit
    values: Unit
    operands: Operands  # Q and K
    weighted: Weighted  # P and V
    prescaled: str  # dtype of operands that the scale has multiplied; "" if it multiplies scores
    # relative error of the product of one Q and one K operand before it is summed
    operand_roundings: float
    # what scores are rounded to, before and after they are scaled; None: they stay fp32
    score_format: DType | None
    scale_roundings: int  # fp32 roundings in the factor of the scores
    probability: DType
    normalised: bool
    exponential: Function  # of the keys
    rescale: Function  # of the rescales, and of a merge
    function: float  # relative error of the elementary function of a score mod
    blocks: int  # n_b
    output: DType
    by_lse: bool = False  # P = exp(S - LSE), with the LSE rounded
    # keys are split among programs whose normalised results are merged by their fp32 LSE
    merged: bool = False
    partial: DType | None = None  # 16 bits that such a result is rounded to; None: it stays fp32
    # s: what an 8-bit P is multiplied by before it is rounded; a power of two
    probability_scale: float = 1.0
    parts: int = 0  # of P V with factors of their own; 0: a head's values have one factor
    output_roundings: int = 0
    largest_factor: float = 1.0  # of V, and at least 1
    # the least that the factors of Q and K multiply a score by, and those of V
    least_factors: tuple[float, float] = (1.0, 1.0)
    most_factor: float = 1.0  # that Q's and K's can multiply the scale by, on the way; at least 1
    lag: float = 0.0  # tau: how far scores may exceed the maximum that is subtracted, natural units
    row_sum: str = "unrounded"
    chain: int = 0  # keys of a block on the longest way into its sum; 0: of the row, in any order
    joins: int = 0  # sums that are added up after that
    running: bool = True  # chains go on from block to block
    division: int = 5  # roundings of the division, or of a reciprocal and its product
    conversion: Conversion | None = None  # of V, to the format of P
    maximum_rows: int = 1  # that share the maximum which is subtracted
    excess: float = 0.0  # how far that may lie above the largest score, natural units
    step: float = 0.0  # the same as a part of its size
    in_order: bool = False  # Q K^T adds its products in the order of head_dim
    key_order: str = "any"  # of blocks of keys
    block_n: int = 0  # keys of one; 0: all
    tile: int = 0  # rows that share an order which depends on what they see; 0: not known
    key_parts: int = 0  # that the blocks are dealt out to, if keys are split; 0: not known
    integers: Integers | None = None  # that Q and K are rounded to
    columns: Columns | None = None  # of V, if that is rounded to 8 bits
    log2_sum: bool = False  # LSE = ln 2 (m + log2 l), of the m that the exponents have
    # What `exact_sums` knows: every weight and rescale of a row is exp(0) = 1; one key of a row has
    # all of its weight.
    ones: bool = False
    one_key: bool = False
    interval: bool = True  # whether the interval of O is asked for, where it is known

    @property
    def ordered(self) -> bool:
        """Whether O is judged by what it must be before its last rounding, too."""
        return self.interval and self.key_order != "any" and self.output.itemsize > 1

    @property
    def without_interval(self) -> ForwardArithmetic:
        """The same bounds without the interval of O, which only an order of keys gives."""
        return replace(self, interval=False) if self.ordered else self

    @property
    def knows_p(self) -> bool:
        """Whether P is rounded once, to nearest, from a number that is known nearly to fp32's
        precision."""
        return (
            self.ordered
            and self.probability_roundoff > 0
            and self.probability.itemsize == 2
            and self.exponential.argument == self.rescale.argument == "float32"
            and self.row_sum == "unrounded"
            and not (self.by_lse or self.leads or (self.merged and not self.key_parts))
        )

    @property
    def sums_rounded(self) -> bool:
        """Whether the row sum may be one of rounded P: roundings are errors of weights then."""
        return self.row_sum != "unrounded"

    @property
    def rounds_apart(self) -> bool:
        """Whether the row sum may be one of unrounded P: roundings are those of P V then."""
        return self.row_sum in ("unrounded", "any")

    @property
    def sums_by_unit(self) -> bool:
        """Whether the unit of P V may make the row sum."""
        return self.row_sum in ("mma", "any")

    @property
    def between_blocks(self) -> int:
        """fp32 roundings behind a block's sum: a rescale and an addition each; for a part with a
        factor, that and an addition, or a rescale by the quotient of two factors."""
        return 2 * self.blocks + 3 * self.parts

    @property
    def exp(self) -> float:
        """eps: relative error of a key's exponential, at 0."""
        return self.exponential.error

    @property
    def flush(self) -> float:
        """eta_P: half the smallest subnormal of P's dtype; fp32 hardware may flush, so nothing
        under 2**-126 is believed."""
        return max(self.probability.smallest_subnormal / 2 / self.probability_scale, TINY)

    @property
    def vanishing(self) -> float:
        """What an exponential in 16 bits may be off by absolutely, more than its result may be; 0
        for others."""
        return vanishing(self.exponential)

    @property
    def probability_roundoff(self) -> float:
        """u_P; a P that has no more bits than its dtype, because it is computed in fp32 and stays
        that or in 16, keeps them. A division in fp32 gives it all bits again."""
        has = DTYPES["float32" if self.normalised else self.exponential.argument].precision
        return 0.0 if self.probability.precision >= has else self.probability.unit_roundoff

    @property
    def offset(self) -> float:
        """ln s + tau: what the exponent holds beside x - m, in a kernel that scales P there or lets
        the maximum lag."""
        return math.log(self.probability_scale) + self.lag

    @property
    def exponent_roundings(self) -> int:
        """How often a row's common part of the exponent may be rounded: ln s may be added to it."""
        return 1 if self.probability_scale == 1 else 2

    @property
    def reach(self) -> float:
        """What un-normalised P reach, but for errors: s e^tau."""
        return self.probability_scale * math.exp(self.lag)

    @property
    def saturates(self) -> float:
        """The P from which on an 8-bit P saturates, in parts of the largest; 0 for wider ones,
        which do not."""
        return self.probability.max / self.reach if self.probability.itemsize == 1 else 0.0

    @property
    def rounds_up(self) -> bool:
        """Whether the largest p~ may be less than 1 although a row has its own maximum."""
        return bool(self.excess or self.step)

    @property
    def leads(self) -> bool:
        """Whether what is subtracted may lie above the row's maximum."""
        return self.rounds_up or self.maximum_rows != 1

    @property
    def exps(self) -> float:
        """|ln(1 + eps)| of a key's own exponential and of the rescales that follow its block (and
        of the merge)."""
        own = 0.0 if self.ones and not self.by_lse else -math.log1p(-self.exp)
        return own + self.rescales - self.merged * math.log1p(-self.rescale.error)

    @property
    def rescales(self) -> float:
        """|ln(1 + eps)| of the rescales behind a block alone."""
        return 0.0 if self.ones else -(self.blocks - 1) * math.log1p(-self.rescale.error)

    @property
    def rescales_by_one(self) -> bool:
        """Whether a block that leaves the maximum as it is rescales by exp(0) = 1, and it is
        declared in which order blocks come."""
        known = self.key_order != "any" and bool(self.rescale.one_at_zero)
        return known and not (self.lag or self.leads) and self.blocks > 1

    @property
    def slope(self) -> float:
        """lambda: what `exps` grows by with the distance of a score from the maximum, in natural
        units."""
        return max(slope_of(self.exponential), slope_of(self.rescale))

    @property
    def narrow(self) -> DType | None:
        """The accumulator's dtype of P V from block to block, if that is not fp32."""
        promoted = isinstance(self.values, Promoted) and not self.values.own
        return (
            None
            if promoted or self.values.accumulator == "float32"
            else DTYPES[self.values.accumulator]
        )


def farthest(function: Function) -> float:
    """Natural units below the maximum from which on the exponential's result, and the exact one,
    are at most half of what it may be off by absolutely: 2**-150 if the table has nothing."""
    return 1.02 * -math.log(function.absolute or 2.0**-150) + 1.0


def vanishing(function: Function) -> float:
    """What an exponential in 16 bits may be off by absolutely, more than its result may be; 0 for
    others."""
    return 0.0 if function.argument == "float32" else function.absolute


def slope_of(function: Function) -> float:
    """What |ln(1 + eps)| grows by with the distance from the maximum, in natural units."""
    if function.uniform:
        return 0.0
    argument = 0.0 if function.argument == "float32" else DTYPES[function.argument].unit_roundoff
    return function.slope / (1 - function.error - function.slope * farthest(function)) + argument
