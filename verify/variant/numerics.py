"""How a kernel computes, and what it promises beyond numbers."""

from __future__ import annotations

from dataclasses import dataclass

from verify.variant.validation import check


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """How the kernel computes; the bounds follow from it.  Terms are those of docs/tolerance.md.

    operands: dtype of Q and K as they enter the product ("input" or "float32"); accumulator: of
    both products, "float32", "float16" or, on CPUs, "bfloat16"; score_accumulator: of Q K^T, where
    it has another; accumulator_rounded: when a sum in bfloat16 is rounded, after every "product",
    or after every "block" of keys (and once in Q K^T), in which sums are fp32. float32_products:
    whether a product of fp32 operands is "ieee", may be "tf32", or is "tf32x3" (high and low
    parts). prescale: what the scale multiplies before QK^T: "none", "q" (q * scale) or "sqrt" (q
    and k * sqrt|scale|), rounded to the operands' dtype.  scores: dtype that QK^T is rounded to
    before the softmax ("float32" or "input"). probability: dtype of P as it enters PV; normalised:
    whether P was divided by the row sum before that.  Operands may have no dtype that does not hold
    the inputs' numbers, and P none but the other one of as many bits. values: V beside a P of the
    other 16-bit dtype: "probability" if V is converted to that too, to nearest; "input" if it is
    not, and the products are those of fp32 numbers. normaliser: what P is divided by: the "sum", or
    "lse" where P = exp(S - LSE) with a rounded LSE. split_keys: whether the keys may be split into
    parts whose results are merged by their LSE (split-KV, flash decoding). exp: name of the
    exponential in `verify.arithmetic.instructions`; rescale_exp: of the one that rescales, where it
    is another.  block_n: keys per rescale (None: the config's; 0: all keys at once, no rescale).
    lazy_rescale: log2 units by which the largest score may exceed the maximum that is subtracted (8
    in FlashAttention-4). maximum_rows: rows of a query head, in tiles from the first, that subtract
    one maximum, the largest of theirs (None: the config's block_m; 0: all rows).  maximum_excess,
    maximum_step: how far what is subtracted may exceed that, because it is rounded up: log2 units,
    and a part of its size. row_sum: what is added up in fp32, P "unrounded", P "rounded" for the
    product, or rounded P by "mma", like P V. row_sum_lanes: chains that the keys of a block are
    dealt out to evenly (4 in FlashAttention-2: threads that share a row); row_sum_apart: each
    block's sum is finished before it is added to the others'.  division: name of the division, or
    of the reciprocal that is multiplied; "any" for the worst. softcap_tanh: name of the tanh.
    scale_roundings: fp32 roundings in the factor that multiplies the scores (1 if the host rounds
    scale * log2(e) once, 3 if the kernel forms it in fp32); descales that enter the factor count
    here.  probability_scale: the power of two that P is multiplied by before it is rounded to an
    8-bit dtype (256 in FlashAttention-3).  promotion: products after which the accumulator of an
    8-bit MMA, or one in fp16, is added to one in fp32 (0: never), in both products; a kernel that
    promotes only P V declares no less than its head dims. output_roundings: fp32 roundings that the
    division leaves to do (a descale of V is one).
    """

    operands: str = "input"
    float32_products: str = "ieee"
    accumulator: str = "float32"
    score_accumulator: str | None = None
    accumulator_rounded: str = "product"
    prescale: str = "none"
    scores: str = "float32"
    probability: str = "input"
    values: str = "probability"
    normalised: bool = False
    normaliser: str = "sum"
    split_keys: bool = False
    exp: str = "ex2.approx"
    rescale_exp: str | None = None
    block_n: int | None = None
    lazy_rescale: float = 0.0
    maximum_rows: int | None = 1
    maximum_excess: float = 0.0
    maximum_step: float = 0.0
    row_sum: str = "unrounded"
    row_sum_lanes: int = 1
    row_sum_apart: bool = False
    division: str = "any"
    softcap_tanh: str = "tanhf"
    scale_roundings: int = 1
    probability_scale: float = 1.0
    promotion: int = 0
    output_roundings: int = 0

    def __post_init__(self) -> None:
        check(self, "numerics")


@dataclass(frozen=True, kw_only=True)
class GradientNumerics:
    """How a backward computes dQ, dK and dV from the saved O and LSE:

        P = exp(S - LSE),  dV = P^T dO,  dP = dO V^T,  delta = rowsum(dO * O),  dS = P (dP - delta),
        dQ = scale dS K,  dK = scale dS^T Q

    accumulator: of the sums that are dQ, dK and dV, "float32" or, rounded after every product,
    "bfloat16"; score_accumulator: of S and dP, where it has another.  (`atomics_dtype` is for sums
    of blocks in 16 bits.) softmax: "saved", as above; or "own" if nothing that was saved is read,
    and both saved tensors hold NaN: P is a softmax of the backward's own scores and divided by its
    row sum, and delta = rowsum(P * dP), as autograd makes it of a composite. operands,
    float32_products, exp, scale_roundings, softcap_tanh: as in `Numerics`, for S, dP and P.
    prescale: "k" if S is of K times the scale (and log2 e), rounded to the operands' dtype, and dQ
    of that K, scaled back, as in Triton's tutorial; "sqrt" if S, dQ and dK are of Q and K that are
    each multiplied by the scale's root; "none". delta: dtype that rowsum(dO * O) is kept in
    ("input" or "float32"). delta_of: "output", as above; or "weights" if delta = rowsum(P * dP), of
    the P from the saved LSE, and O is not read: it holds NaN. probability, score_gradient: dtypes
    that P and dS are rounded to for the products ("input" or "float32"). score_gradient_of: the P
    that dS, and a delta of weights, is made of: "unrounded", or "rounded" as for P^T dO (a P that
    was kept in 16 bits). score_gradient_scaled: whether the scale has multiplied dS before it is
    rounded. block_m, block_n: rows per partial sum of dK and dV, keys per partial sum of dQ (None:
    the config's; 0: one chain). group: how the query heads that share a key head are summed:
    "float32", or "cast", each rounded to the output first. atomics: which of "dq", "dk", "dv" are
    added up in memory in no fixed order, scaled, in atomics_dtype ("float32" or "input").
    gradient_roundings: fp32 roundings of the finished sums, or of every term dS alike, before that
    to the output's dtype (1 for the scale).
    """

    softmax: str = "saved"
    operands: str = "input"
    float32_products: str = "ieee"
    accumulator: str = "float32"
    score_accumulator: str | None = None
    exp: str = "ex2.approx"
    scale_roundings: int = 1
    softcap_tanh: str = "tanhf"
    prescale: str = "none"
    delta: str = "float32"
    delta_of: str = "output"
    probability: str = "input"
    score_gradient: str = "input"
    score_gradient_of: str = "unrounded"
    score_gradient_scaled: bool = False
    block_m: int | None = None
    block_n: int | None = None
    group: str = "float32"
    atomics: tuple[str, ...] = ()
    atomics_dtype: str = "float32"
    gradient_roundings: int = 1

    def __post_init__(self) -> None:
        check(self, "gradients")

    @property
    def reads_out(self) -> bool:
        """Whether the saved O is read."""
        return self.softmax == "saved" and self.delta_of == "output"
