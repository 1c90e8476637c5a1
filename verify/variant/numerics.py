"""How a kernel computes.  The bounds follow from it; terms are those of docs/tolerance.md.

`Numerics` and `GradientNumerics` are made of parts.  A comment says what each field means;
`verify.variant.validation.RULES` holds its legal values, by the path ("numerics.products.operands")
that errors and reports name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from references.premises import Premise
from verify.variant.validation import Declared

_Kind = TypeVar("_Kind")


@dataclass(frozen=True, kw_only=True)
class _Products(Declared):
    """What the products of a forward and those of a backward declare alike."""

    # dtype of Q and K (and of dO and V, in a backward) as they enter the product: "input", or one
    # that holds all of the inputs' numbers
    operands: str = "input"
    # what multiplies fp32 operands: "ieee"; "tf32" if that is possible; "tf32x3" (high and low
    # parts)
    float32_products: str = "ieee"
    # what multiplies 16-bit, 8-bit and tf32 operands on a GPU: a matrix instruction, or "fma" for
    # the scalar units; "any" for the least accurate that the architecture has.  On sm_90 sums of
    # 8-bit products keep 13 fraction bits by wgmma, and fp32's by mma.sync
    instruction: str = "any"
    # dtype of the running sums of all products; "bfloat16" on CPUs
    accumulator: str = "float32"
    # dtype of the running sums of Q K^T (and of dO V^T), if it is another one
    score_accumulator: str | None = None


@dataclass(frozen=True, kw_only=True)
class Products(_Products, path="numerics.products"):
    """The two products of a forward, Q K^T and P V."""

    # when a sum in bfloat16 is rounded: after every "product", or after every "block" of keys (and
    # once in Q K^T), in which sums are fp32
    accumulator_rounded: str = "product"
    # what the scale multiplies before Q K^T: "none", "q" (q * scale) or "sqrt" (q and k *
    # sqrt|scale|), rounded to the operands' dtype
    prescale: str = "none"
    # products after which an 8-bit or fp16 accumulator is added to one in fp32 (0: never), or
    # "block" if P V alone is, after every block of keys
    promotion: int | str = 0

    def promotions(self, keys: int) -> tuple[int, int]:
        """Products after which Q K^T and P V are promoted, 0 for never; keys: of a block."""
        if isinstance(self.promotion, str):
            return 0, keys
        return self.promotion, self.promotion


@dataclass(frozen=True, kw_only=True)
class Maximum(Declared, path="numerics.softmax.maximum"):
    """What is subtracted from the scores of a row: the order of a running maximum, and where it is
    none."""

    # log2 units by which the largest score may exceed what is subtracted, because the rescale is
    # lazy (8 in FlashAttention-4)
    lag: float = 0.0
    # rows of a query head, in tiles from the first, that subtract one maximum, the largest of
    # theirs (None: the config's block_m; 0: all rows)
    rows: int | None = 1
    # log2 units by which what is subtracted may exceed the maximum, because it is rounded up
    excess: float = 0.0
    # and by which part of its size
    step: float = 0.0
    # the order in which a running maximum gets to know the blocks of keys, [j block_n, (j + 1)
    # block_n) from key 0 on: "ascending", "descending", or "whole_first" if a tile of rows takes
    # those first that all of its rows see whole, then the others, both ascending.  P is known as it
    # is rounded then.  "any" promises nothing, not even that O is rounded once
    key_order: str = "any"
    # where keys are split among programs (output.split_keys), each with a maximum of its own: the
    # parts that the blocks from the first to the last visible one are dealt out to, evenly and in
    # order (0: not known; None: the config's option "split")
    parts: int | None = 0


@dataclass(frozen=True, kw_only=True)
class RowSum(Declared, path="numerics.softmax.row_sum"):
    """How P is added up along a row."""

    # what is added up in fp32: P "unrounded"; P "rounded" for the product; rounded P by "mma", like
    # P V; or "any" of these
    of: str = "unrounded"
    # chains that the keys of a block are dealt out to evenly (4 in FlashAttention-2: threads that
    # share a row)
    lanes: int = 1
    # whether each block's sum is finished before it is added to the sum of the others
    apart: bool = False
    # how the LSE is made of the sum l and the maximum m: "log2" if scores are in log2 units, P is
    # 2^(x - m), a rescale 2^(m - m'), and the LSE ln 2 (m + log2 l) of that very m, in fp32, with
    # one rounding for the sum and one for the product; m + log2 l if its contract has base 2.
    # "any" promises nothing
    lse: str = "any"


@dataclass(frozen=True, kw_only=True)
class _Exponential(Declared):
    """What the softmax of a forward and that of a backward declare alike."""

    # name of the exponential in `verify.arithmetic.instructions`
    exp: str = "ex2.approx"
    # fp32 roundings in the factor that multiplies the scores (1 if the host rounds scale * log2(e)
    # once, 3 if the kernel forms it in fp32); descales that enter the factor count here
    scale_roundings: int = 1
    # name of the tanh of a softcap
    softcap_tanh: str = "tanhf"


@dataclass(frozen=True, kw_only=True)
class Softmax(_Exponential, path="numerics.softmax"):
    """From scores to P and its row sum."""

    # dtype that Q K^T is rounded to before the softmax
    scores: str = "float32"
    # name of the exponential that rescales, if it is another one
    rescale_exp: str | None = None
    # keys per rescale (None: the config's; 0: all keys at once, no rescale)
    block_n: int | None = None
    maximum: Maximum = field(default_factory=Maximum)
    row_sum: RowSum = field(default_factory=RowSum)


@dataclass(frozen=True, kw_only=True)
class Output(Declared, path="numerics.output"):
    """From P and V to O."""

    # dtype of P as it enters P V: one that holds all of the inputs' numbers, or the other one of as
    # many bits
    probability: str = "input"
    # V beside a P of the other 16-bit dtype: "probability" if V is converted to that too, to
    # nearest; "input" if it is not, and the products are those of fp32 numbers
    values: str = "probability"
    # the power of two that P is multiplied by before it is rounded to an 8-bit dtype (256 in
    # FlashAttention-3)
    probability_scale: float = 1.0
    # whether P was divided by the row sum before it enters P V
    normalised: bool = False
    # what P is divided by: the "sum", or "lse" where P = exp(S - LSE) with a rounded LSE
    normaliser: str = "sum"
    # whether the keys may be split into parts whose results are merged by their LSE (split-KV,
    # flash decoding); "input" if the O of a part is rounded to the inputs' dtype before
    split_keys: bool | str = False
    # name of the division, or of the reciprocal that is multiplied; "any" for the worst
    division: str = "any"
    # fp32 roundings that the division leaves to do (a descale of V is one)
    roundings: int = 0


@dataclass(frozen=True, kw_only=True)
class Order(Declared, path="numerics.order"):
    """In which order sums are made."""

    # Q K^T, along head_dim: "ascending", what one matrix instruction multiplies being neighbours,
    # and on a GPU without one product by product; "any" for every other order
    head_dim: str = "any"


@dataclass(frozen=True, kw_only=True)
class Quantised(Declared, path="numerics.quantised"):
    """Q and K that the kernel rounds to integers, with factors that it computes itself."""

    # what Q and K are multiplied as: "none", as `products` says; or "int8", integers round(x /
    # factor) with factor = max |x| / 127 over some rows and all of head_dim, to nearest (ties
    # anyhow), whose products are added up in int32 and multiplied by both factors in fp32
    products: str = "none"
    # rows of a query head, in tiles from the first, among which those that share a factor are: all
    # of a tile, or fewer in any pattern (None: the config's block_m; 0: all rows)
    query_tile: int | None = 0
    # the same of keys of a key head (None: the config's block_n)
    key_tile: int | None = 0
    # what a factor can be larger by than max |x| / 127, so that it is not 0 (1e-7 in SageAttention)
    floor: float = 0.0
    # whether softmax_scale, with log2 e or without, multiplies Q in fp32 before that
    query_scaled: bool = False
    # "none"; or the dtype, "input" or "float32", to which the mean of a head's keys, K minus that
    # mean, and the product of Q and the mean that LSE gets back are rounded
    centred: str = "none"
    # what the largest |V| of a column, over all keys of a head, becomes when V is rounded to the
    # 8-bit dtype of P by a factor for each column (448 for all of e4m3); 0: V is not quantised
    value_top: float = 0.0
    # what the largest P becomes before it is rounded to 8 bits beside that, scaled in the exponent
    probability_top: float = 0.0

    @property
    def label(self) -> str:
        """The rounding in messages."""
        return f"the kernel's own rounding of Q{', K and V' if self.value_top else ' and K'}"

    @property
    def breaks(self) -> frozenset[Premise]:
        """The premises of oracles that do not hold."""
        if self.products == "none":
            return frozenset()
        return _BROKEN | {Premise.LINEAR_IN_VALUES} if self.value_top else _BROKEN


# A score depends on all that shares a factor, or the mean, with its query or key, seen or not.
_BROKEN = frozenset(
    {
        Premise.LINEAR_SCORES,
        Premise.POSITION_FREE_SCORES,
        Premise.SCALE_HOMOGENEOUS,
        Premise.HIDDEN_HAS_NO_EFFECT,
    }
)


@dataclass(frozen=True, kw_only=True)
class Numerics(Declared, path="numerics"):
    """How a forward computes O and LSE."""

    products: Products = field(default_factory=Products)
    softmax: Softmax = field(default_factory=Softmax)
    output: Output = field(default_factory=Output)
    order: Order = field(default_factory=Order)
    quantised: Quantised = field(default_factory=Quantised)


@dataclass(frozen=True, kw_only=True)
class GradientProducts(_Products, path="gradients.products"):
    """The five products of a backward; `accumulator` is that of the sums dQ, dK and dV."""

    # "k" if S is of K times the scale (and log2 e), rounded to the operands' dtype, and dQ of that
    # K, scaled back, as in Triton's tutorial; "sqrt" if S, dQ and dK are of Q and K that are each
    # multiplied by the scale's root; "alpha" if the products get the scale as BLAS's alpha, which
    # multiplies, in fp32, K or the result of S, and an operand or the result of dQ and dK; "none"
    prescale: str = "none"


@dataclass(frozen=True, kw_only=True)
class GradientSoftmax(_Exponential, path="gradients.softmax"):
    """From scores to P again."""

    # "saved": P = exp(S - LSE).  "own": nothing that was saved is read, and both saved tensors hold
    # NaN: P is a softmax of the backward's own scores and divided by its row sum, and delta =
    # rowsum(P * dP), as autograd makes it of a composite
    source: str = "saved"
    # dtype that P is rounded to for P^T dO
    probability: str = "input"


@dataclass(frozen=True, kw_only=True)
class ScoreGradient(Declared, path="gradients.score_gradient"):
    """dS = P (dP - delta)."""

    # dtype that dS is rounded to for the products
    dtype: str = "input"
    # the P that dS, and a delta of weights, is made of: "unrounded", or "rounded" as for P^T dO (a
    # P that was kept in 16 bits)
    of: str = "unrounded"
    # whether the scale has multiplied dS before it is rounded
    scaled: bool = False
    # dtype that delta is kept in
    delta: str = "float32"
    # "output": delta = rowsum(dO * O).  "weights": delta = rowsum(P * dP), of the P from the saved
    # LSE, and O is not read: it holds NaN
    delta_of: str = "output"


@dataclass(frozen=True, kw_only=True)
class GradientSums(Declared, path="gradients.sums"):
    """From products to dQ, dK and dV."""

    # rows per partial sum of dK and dV (None: the config's; 0: one chain)
    block_m: int | None = None
    # keys per partial sum of dQ (None: the config's; 0: one chain)
    block_n: int | None = None
    # how the query heads that share a key head are summed: in "float32", or "cast", each rounded to
    # the output first
    group: str = "float32"
    # which of "dq", "dk", "dv" are added up in memory in no fixed order, scaled
    atomics: tuple[str, ...] = ()
    # dtype of those; `accumulator` says what the sums of blocks are kept in before
    atomics_dtype: str = "float32"
    # fp32 roundings of the finished sums, or of every term dS alike, before that to the output's
    # dtype (1 for the scale)
    roundings: int = 1


@dataclass(frozen=True, kw_only=True)
class GradientOrder(Declared, path="gradients.order"):
    """In which order a backward's sums are made.

    `keys` and `rows` are of sums that run through all blocks (a block size of 0 in `GradientSums`)
    and no atomics.  The positions [16 i, 16 i + 16) are neighbours, among which any order is right:
    "ascending", they come from the first to the last; "whole_first", in blocks of such neighbours,
    of which those come first that a tile sees whole, then those before these, then those behind,
    each ascending; "any" promises nothing.
    """

    # S = Q K^T and dP = dO V^T, along head_dim, each from zero: as `numerics.order.head_dim`
    head_dim: str = "any"
    # dQ, along the keys
    keys: str = "any"
    # dK and dV, along the rows of a query head; heads of a group one after the other, in any order
    rows: str = "any"


@dataclass(frozen=True, kw_only=True)
class GradientNumerics(Declared, path="gradients"):
    """How a backward computes dQ, dK and dV from the saved O and LSE:

    P = exp(S - LSE),  dV = P^T dO,  dP = dO V^T,  delta = rowsum(dO * O),  dS = P (dP - delta),
    dQ = scale dS K,  dK = scale dS^T Q
    """

    products: GradientProducts = field(default_factory=GradientProducts)
    softmax: GradientSoftmax = field(default_factory=GradientSoftmax)
    score_gradient: ScoreGradient = field(default_factory=ScoreGradient)
    sums: GradientSums = field(default_factory=GradientSums)
    order: GradientOrder = field(default_factory=GradientOrder)

    @property
    def reads_out(self) -> bool:
        """Whether the saved O is read."""
        return self.softmax.source == "saved" and self.score_gradient.delta_of == "output"


def leaves(declared: Any) -> dict[str, Any]:
    """The fields of all parts of a declaration, by path ("softmax.maximum.lag"); a declaration as
    plain data, as `asdict` makes it, has the same ones."""
    if is_dataclass(declared):
        declared = {each.name: getattr(declared, each.name) for each in fields(declared)}
    found: dict[str, Any] = {}
    for name, value in declared.items():
        if is_dataclass(value) or isinstance(value, Mapping):
            found |= {f"{name}.{path}": leaf for path, leaf in leaves(value).items()}
        else:
            found[name] = value
    return found


def rebuilt(kind: type[_Kind], data: Mapping[str, Any]) -> _Kind:
    """A declaration from its plain data; raises DeclarationError that names the first bad field."""
    values = dict(data)
    for each in fields(kind):  # type: ignore[arg-type]
        part, value = each.default_factory, data.get(each.name)
        if isinstance(part, type) and isinstance(value, Mapping):
            values[each.name] = rebuilt(part, value)
    return kind(**values)
