"""P in the other 16-bit format than the inputs', with V converted or not: honest kernels pass,
others do not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from references.masks import Causal, Lengths
from tests.harness.declared import flat_numerics
from tests.harness.emulation import Kernel, Luck, emulate
from tests.harness.property_cases import Bench, bench
from tests.meta.judging.test_metamorphic import SQUARE
from tests.meta.tolerance.test_tolerance import SHAPES, ratios, suits, truth_of
from tests.meta.tolerance.test_tolerance_bound import bound_of, with_operands
from verify.oracles.numerics.oracle import asks
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.statistics.forward import underived
from verify.tolerance.forward import resolve
from verify.variant import Config

pytestmark = pytest.mark.usefixtures("one_thread")

TO_HALF, TO_BFLOAT = {"probability": "float16"}, {"probability": "bfloat16"}
HALF, BFLOAT = ("float16",), ("bfloat16",)
AS_IT_IS = {"values": "input"}
HONEST = (
    Kernel("fp16 P and V of bf16 inputs", flat_numerics(**TO_HALF, block_n=32), dtypes=BFLOAT),
    Kernel(
        "fused, sm_80",
        flat_numerics(**TO_HALF, block_n=32, scale_roundings=3),
        arch="sm_80",
        dtypes=BFLOAT,
        style="fused",
    ),
    Kernel(
        "V as it is, CPU",
        flat_numerics(**TO_HALF, **AS_IT_IS, exp="exp_u20", block_n=64),
        arch="cpu",
        dtypes=BFLOAT,
    ),
    Kernel("bf16 P and V of fp16 inputs", flat_numerics(**TO_BFLOAT, block_n=32), dtypes=HALF),
    Kernel(
        "bf16 P, V as it is",
        flat_numerics(**TO_BFLOAT, **AS_IT_IS, row_sum_of="rounded", block_n=32),
        dtypes=HALF,
    ),
    Kernel(
        "normalised P in fp16",
        flat_numerics(**TO_HALF, operands="float32", normalised=True, exp="vexp", block_n=0),
        arch="cpu",
        style="eager",
        dtypes=BFLOAT,
    ),
    Kernel(
        "fp16 P and accumulators",
        flat_numerics(**TO_HALF, accumulator="float16", score_accumulator="float32", block_n=32),
        dtypes=BFLOAT,
    ),
)


@pytest.mark.first_look(2)
@pytest.mark.parametrize("kernel", HONEST, ids=lambda kernel: kernel.name)
def test_honest_kernels_stay_within_the_bound(kernel: Kernel) -> None:
    shapes = [shape for shape in SHAPES if suits(kernel, shape)]
    for turn, (dtype, distribution) in enumerate(itertools.product(kernel.dtypes, ordinary())):
        text = f"{shapes[turn * 5 % len(shapes)]},dtype={dtype},dist={distribution}"
        problem = Problem.parse(text)
        truth = truth_of(problem, kernel.numerics, kernel.arch)
        found = ratios(problem, emulate(problem, kernel, list(Luck)[turn % 2]), truth)
        assert found.worst <= 1, f"{kernel.name}: r = {found.worst:.3g} for {problem.name}"


LONG = "sq=16,skv=96,d=64"
FAULTS = {
    "P in fewer bits": (HONEST[0].but(probability="input"), HONEST[0], f"{LONG},dtype=bfloat16"),
    "bf16 P of fp16 inputs, undeclared": (
        HONEST[3],
        HONEST[3].but(probability="input"),
        f"{LONG},dtype=float16",
    ),
    "V rounded in secret": (
        HONEST[3].but(row_sum_of="rounded"),
        HONEST[4],
        "sq=16,skv=4,d=64,dtype=float16,scale=4.0",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_exceed_the_bound(name: str) -> None:
    faulty, declared, text = FAULTS[name]
    problem = Problem.parse(text)
    truth = truth_of(problem, declared.numerics, declared.arch)
    assert ratios(problem, emulate(problem, declared), truth).worst <= 1
    assert ratios(problem, emulate(problem, faulty), truth).worst > 1


def test_what_a_conversion_of_v_costs() -> None:
    """bf16's numbers are fp16's down to 2^-17 and up to 65504; fp16's lose three bits to bf16."""

    def bound_with(v: list[float], dtype: str, **numerics: object) -> torch.Tensor:
        return with_operands([0.0], [0.0] * len(v), v, dtype=dtype, **numerics).out[0]

    normal, small, large = [1.0, 0.5], [1.0, 2.0**-20], [1.0, 65536.0]
    for values, lost in ((normal, 0.0), (small, 2.0**-25)):
        converted = bound_with(values, "bfloat16", **TO_HALF)
        as_it_is = bound_with(values, "bfloat16", **TO_HALF, **AS_IT_IS)
        assert bool((converted >= as_it_is + lost).all())
        assert bool((converted <= as_it_is * 1.001 + 2 * lost + 2.0**-25).all())
    assert bool(bound_with(large, "bfloat16", **TO_HALF).isinf().all())
    assert bool(bound_with(large, "bfloat16", **TO_HALF, **AS_IT_IS).isfinite().all())
    rounded = bound_with(normal, "float16", **TO_BFLOAT)
    assert bool((rounded >= bound_with(normal, "float16", **TO_BFLOAT, **AS_IT_IS) + 2.0**-9).all())


def test_the_words_show_in_the_bounds() -> None:
    text = "sq=20,skv=128,d=64,scale=0.02,dist=same_sign_v,dtype=float16"
    found = [
        bound_of(text, flat_numerics(**changes)).out
        for changes in ({}, {**TO_BFLOAT, **AS_IT_IS}, TO_BFLOAT)
    ]
    assert bool((found[0] < found[1]).all())
    assert bool((found[1] < found[2]).all())


def test_statistics_predict_no_roundings_of_v() -> None:
    problem = Problem.parse("sq=20,skv=128,d=64,dtype=float16")
    for numerics, said in (
        (flat_numerics(**TO_BFLOAT), "values"),
        (flat_numerics(**TO_BFLOAT, **AS_IT_IS), "None"),
    ):
        assert said in str(underived(resolve(numerics, Config(), problem, "sm_90")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"values": "float16"},
            r"numerics\.output\.values: 'float16' is none of probability, input",
        ),
        ({"probability": "float8_e5m2"}, r"numerics\.output\.probability: .*'float8_e5m2'"),
        (
            {**TO_HALF, **AS_IT_IS, "accumulator": "float16"},
            r"numerics\.products\.accumulator: .*'float16'",
        ),
    ],
    ids=str,
)
def test_what_is_not_derived_is_refused(changes: dict[str, object], message: str) -> None:
    problem = Problem(seqlen_q=1, seqlen_kv=1, head_dim=16, dtype="bfloat16")
    with pytest.raises(ValueError, match=message):
        resolve(flat_numerics(**changes), Config(), problem, "sm_90")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench("other_format.py", tmp_path_factory.mktemp("format")) as found:
        yield found


RIGHT = {"right": "bfloat16", "values-as-they-are": "float16", "both-in-bfloat16": "float16"}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_passes(name: str, opened: Bench) -> None:
    problem = SQUARE.but(dtype=RIGHT[name])
    for oracle in ("bound", "convexity", "repeat", "execution", "memory"):
        verdict = opened.verdict(name, "accuracy", oracle, problem)
        assert verdict.outcome == "pass", verdict.finding
    for group, masked in (
        ("poison", problem.but(mask=Causal())),
        ("power_of_two", problem.but(distribution="octaves")),
        ("gather", problem.but(distribution="gather", mask=Lengths((24, 3), (9, 7)))),
        ("counting", problem.but(distribution="counting")),
        ("declared_numerics", asks(opened.variants[name], problem.dtype)[0]),
    ):
        verdict = opened.verdict(name, group, group, masked)
        assert verdict.outcome == "pass", verdict.finding


@pytest.mark.parametrize(
    ("name", "dtype"), [("converts-in-secret", "float16"), ("rounds-to-bfloat16", "bfloat16")]
)
def test_a_wrong_one_is_convicted(name: str, dtype: str, opened: Bench) -> None:
    problem = SQUARE.but(dtype=dtype, softmax_scale=4.0, seqlen_kv=4)
    verdicts = [
        opened.verdict(name, "accuracy", "bound", problem.but(seed=seed)) for seed in range(4)
    ]
    assert any(verdict.outcome == "fail" for verdict in verdicts)
