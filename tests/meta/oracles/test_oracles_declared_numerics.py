"""Declared numerics on trial: each false claim is named, honest and better kernels pass."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.harness.declared import with_fields
from tests.harness.fake_trials import acquitted, convicted
from tests.harness.in_process import NUMERICS, Kernel, declared, trial
from tests.properties import tier
from verify.judging.findings import Ruling
from verify.oracles.numerics import oracle as declared_numerics
from verify.variant import Contract, Numerics

torch.set_num_threads(1)

HALF, BRAIN = torch.float16, torch.bfloat16
NO_LSE = Contract(lse=None)


def judged(
    kernel: Kernel,
    dtype: str = "bfloat16",
    numerics: Numerics = NUMERICS,
    contract: Contract | None = None,
) -> Ruling:
    declaration = declared(contract, numerics)
    (problem,) = declared_numerics.asks(declaration, dtype)
    return declared_numerics.judge(trial(kernel, problem, declaration))


def polynomial(*coefficients: float) -> object:
    """An exponential whose fraction of the power of two is a polynomial."""

    def exp(x: Tensor) -> Tensor:
        power = (x.double() * math.log2(math.e)).clamp(min=-120)
        whole = power.floor()
        value = sum(c * (power - whole) ** i for i, c in enumerate(coefficients))
        return torch.where(x < -80, 0.0, value * torch.exp2(whole)).float()

    return exp


SQUARE = polynomial(1.0, 0.6565, 0.3435)  # errs by 2e-3
CUBIC = polynomial(1.0, 0.695146, 0.227564, 0.0771191)  # FlashAttention-4's, errs by 8.8e-5


def tf32(x: Tensor) -> Tensor:
    """The low 13 bits dropped."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


FALSE = {
    "fp16 scores' accumulator": (
        Kernel(score_accumulator=HALF),
        "float16",
        "accumulator of Q K^T float32; behaves like float16",
    ),
    "fp16 accumulator, bf16 data": (
        Kernel(score_accumulator=HALF, group=8),
        "bfloat16",
        "Q K^T float32; behaves like float16",
    ),
    "bf16 scores' accumulator": (
        Kernel(score_accumulator=BRAIN),
        "bfloat16",
        "Q K^T float32; behaves like bfloat16",
    ),
    "fp16 values' accumulator": (
        Kernel(value_accumulator=HALF),
        "float16",
        "accumulator of P V float32; behaves like float16",
    ),
    "fp16 P V, 32 at a time": (
        Kernel(value_accumulator=HALF, group=32),
        "bfloat16",
        "P V float32; behaves like float16",
    ),
    "bf16 values' accumulator": (
        Kernel(value_accumulator=BRAIN),
        "bfloat16",
        "accumulator of P V float32; behaves like bfloat16",
    ),
    "fp16 accumulator, fp32 data": (
        Kernel(value_accumulator=HALF, group=1),
        "float32",
        "P V float32; behaves like float16",
    ),
    "bf16 scores": (Kernel(scores=BRAIN), "bfloat16", "scores float32; behaves like bfloat16"),
    "fp16 scores": (Kernel(scores=HALF), "float16", "scores float32; behaves like float16"),
    "bf16 scores, fp32 data": (
        Kernel(scores=BRAIN),
        "float32",
        "scores float32; behaves like bfloat16",
    ),
    "q prescaled in bf16": (
        Kernel(prescale=True),
        "bfloat16",
        "behaves like q, rounded to bfloat16",
    ),
    "q prescaled in fp16": (Kernel(prescale=True), "float16", "behaves like q, rounded to float16"),
    "tf32": (Kernel(operands=tf32), "float32", "behaves like none, but products of tf32"),
    "P in e4m3": (
        Kernel(probability=torch.float8_e4m3fn),
        "bfloat16",
        "P bfloat16; behaves like float8_e4m3fn",
    ),
    "P in e5m2": (
        Kernel(probability=torch.float8_e5m2),
        "float16",
        "P float16; behaves like float8_e5m2",
    ),
    "P in bf16 under fp16": (
        Kernel(probability=BRAIN),
        "float16",
        "P float16; behaves like bfloat16",
    ),
    "P in fp16 under fp32": (
        Kernel(probability=HALF),
        "float32",
        "P float32; behaves like float16",
    ),
    "rounded row sum, bf16": (
        Kernel(rounded_sum=True),
        "bfloat16",
        "behaves like of P rounded to bfloat16",
    ),
    "rounded row sum, fp16": (
        Kernel(rounded_sum=True),
        "float16",
        "behaves like of P rounded to float16",
    ),
    "quadratic exponential": (
        Kernel(exp=SQUARE),
        "bfloat16",
        "exponential vexp; behaves like within 2^-",
    ),
    "cubic exponential": (
        Kernel(exp=CUBIC),
        "float16",
        "exponential vexp; behaves like within 2^-14",
    ),
    "cubic exponential, fp32": (
        Kernel(exp=CUBIC),
        "float32",
        "exponential vexp; behaves like within 2^-1",
    ),
}


@pytest.mark.parametrize("name", tier.for_ci(FALSE, keep=4))
def test_a_false_claim_is_named(name: str) -> None:
    kernel, dtype, words = FALSE[name]
    finding = convicted(judged(kernel, dtype), words)
    assert finding.message.count("declares") == 1, f"one fault, one claim: {finding.message}"


WITHOUT_LSE = [
    name
    for name in FALSE
    if "row sum" not in name and ("exponential" not in name or "fp32" in name)
]


@pytest.mark.parametrize("name", tier.for_ci(WITHOUT_LSE, keep=4))
def test_a_false_claim_is_named_without_an_lse(name: str) -> None:
    kernel, dtype, words = FALSE[name]
    convicted(judged(kernel, dtype, contract=NO_LSE), words)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    "contract", [None, NO_LSE, Contract(lse="base2")], ids=["natural", "no lse", "base 2"]
)
def test_an_honest_kernel_passes(dtype: str, contract: Contract | None) -> None:
    base2 = contract is not None and contract.lse == "base2"
    kernel = (
        Kernel(lse=lambda natural, top, total, scale: natural / math.log(2)) if base2 else Kernel()
    )
    ruling = judged(kernel, dtype, contract=contract)
    assert acquitted(ruling)
    wanted = {
        "accumulator of Q K^T": "float32",
        "accumulator of P V": "float32",
        "scores": "float32",
        "operands": "none",
        "P": dtype,
    }
    assert {name: ruling.observed[name] for name in wanted} == wanted


HONEST = {
    "bf16 scores": (
        Kernel(scores=BRAIN),
        "bfloat16",
        with_fields(NUMERICS, scores="input"),
        "scores",
        "bfloat16",
    ),
    "fp16 accumulators": (
        Kernel(score_accumulator=HALF, value_accumulator=HALF),
        "float16",
        with_fields(NUMERICS, accumulator="float16"),
        "accumulator of P V",
        "float16, rounded every 16 products",
    ),
    "fp16 scores' accumulator": (
        Kernel(score_accumulator=HALF),
        "float16",
        with_fields(NUMERICS, score_accumulator="float16"),
        "accumulator of Q K^T",
        "float16, rounded every 16 products",
    ),
    "rounded row sum": (
        Kernel(rounded_sum=True),
        "bfloat16",
        with_fields(NUMERICS, row_sum_of="rounded"),
        "row sum",
        "of P rounded to bfloat16",
    ),
    "q prescaled": (
        Kernel(prescale=True),
        "float16",
        with_fields(NUMERICS, prescale="q"),
        "operands",
        "q, rounded to float16",
    ),
    "P in fp32": (
        Kernel(probability=torch.float32),
        "float16",
        with_fields(NUMERICS, probability="float32"),
        "P",
        "float32",
    ),
    "cubic": (
        Kernel(exp=CUBIC),
        "bfloat16",
        with_fields(NUMERICS, exp="exp2_poly3"),
        "exponential",
        "within 2^-14",
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_the_same_passes_where_it_is_declared(name: str) -> None:
    kernel, dtype, numerics, item, word = HONEST[name]
    ruling = judged(kernel, dtype, numerics)
    assert acquitted(ruling)
    assert ruling.observed[item] == word


BETTER = {
    "P": (Kernel(probability=torch.float32), "bfloat16", NUMERICS, "P", "float32"),
    "scores": (Kernel(), "bfloat16", with_fields(NUMERICS, scores="input"), "scores", "float32"),
    "accumulators": (
        Kernel(),
        "float16",
        with_fields(NUMERICS, accumulator="float16"),
        "accumulator of P V",
        "float32",
    ),
    "row sum": (
        Kernel(),
        "float16",
        with_fields(NUMERICS, row_sum_of="rounded"),
        "row sum",
        "of P before rounding",
    ),
    "operands": (Kernel(), "float16", with_fields(NUMERICS, prescale="sqrt"), "operands", "none"),
    "exponential": (
        Kernel(),
        "float16",
        with_fields(NUMERICS, exp="exp2_poly3"),
        "exponential",
        "within 2^-21",
    ),
}


@pytest.mark.parametrize("name", BETTER)
def test_better_than_declared_passes_and_shows(name: str) -> None:
    kernel, dtype, numerics, item, word = BETTER[name]
    ruling = judged(kernel, dtype, numerics)
    assert acquitted(ruling)
    assert ruling.observed[item] == word
    assert f"{item}:contradicts" not in ruling.observed


def eight(fixed: int | None, promotion: int, arch: str) -> Ruling:
    """An e4m3 kernel whose unit keeps 13 fraction bits, promoted as `fixed` says, which declares
    `promotion`."""
    numerics = with_fields(NUMERICS, promotion=promotion, block_n=64)
    declaration = declared(numerics=numerics, dtypes=("float8_e4m3fn",))
    (problem,) = declared_numerics.asks(declaration, "float8_e4m3fn")
    return declared_numerics.judge(trial(Kernel(fixed=fixed), problem, declaration, arch))


@pytest.mark.parametrize(
    ("promotion", "arch"), [(32, "sm_90"), (32, "cpu"), (0, "cpu"), (64, "sm_100")]
)
def test_a_promotion_that_is_missing_is_named(promotion: int, arch: str) -> None:
    finding = convicted(
        eight(0, promotion, arch),
        "accumulator of P V",
        "behaves like 13 fraction bits, never promoted",
    )
    assert "declares P " not in finding.message


@pytest.mark.parametrize(
    ("fixed", "promotion", "word"),
    [
        (0, 0, "13 fraction bits, never promoted"),
        (64, 64, "13 fraction bits, promoted every 64"),
        (32, 64, "13 fraction bits, promoted every 32"),
        (None, 64, "float32"),
    ],
)
def test_a_promotion_as_declared_or_better_passes(
    fixed: int | None, promotion: int, word: str
) -> None:
    ruling = eight(fixed, promotion, "sm_90")
    assert acquitted(ruling)
    assert ruling.observed["accumulator of P V"] == word
    assert ruling.observed["P"] == "float8_e4m3fn"


def test_half_of_a_claim_that_is_false_is_told_from_the_other() -> None:
    """An fp16 accumulator that is declared for the scores alone, in both products."""
    kernel = Kernel(score_accumulator=HALF, value_accumulator=HALF)
    finding = convicted(
        judged(kernel, "float16", with_fields(NUMERICS, score_accumulator="float16")),
        "accumulator of P V float32",
    )
    assert "accumulator of Q K^T" not in finding.message


def test_an_lse_of_another_base_is_no_false_exponential() -> None:
    """The contract oracle's business."""
    kernel = Kernel(lse=lambda natural, top, total, scale: natural / math.log(2))
    assert acquitted(judged(kernel, "float32"))
