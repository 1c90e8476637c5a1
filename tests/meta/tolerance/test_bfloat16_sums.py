"""Accumulators in bfloat16, forward and backward: honest kernels pass, and what they declare is
held against them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from references.masks import Causal, Full, Lengths
from tests.harness.backward_inputs import Inputs, nominal
from tests.harness.declared import flat_gradients, flat_numerics
from tests.harness.emulation import Kernel, Luck, emulate
from tests.harness.emulation_backward import NAMES, BackwardKernel
from tests.harness.emulation_backward import emulate as emulate_backward
from tests.harness.honest_backwards import FULL, arithmetic, numerics, saver
from tests.harness.honest_backwards import SHAPES as SHAPES_BACKWARD
from tests.harness.honest_backwards import ratios as ratios_backward
from tests.harness.honest_backwards import truth_of as truth_of_backward
from tests.harness.property_cases import Bench, bench
from tests.meta.judging.test_metamorphic import SQUARE
from tests.meta.tolerance.test_tolerance import ALL, SHAPES, ratios, suits, truth_of
from tests.meta.tolerance.test_tolerance_bound import bound_of, with_operands
from verify.arithmetic.mma import provenance, unit_for
from verify.judging.comparison import compare
from verify.oracles import gather
from verify.oracles.numerics.oracle import asks
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.statistics import forward as statistics
from verify.statistics import gradients as statistics_backward
from verify.tolerance import backward as tolerance_backward
from verify.tolerance.forward import resolve
from verify.variant import Config, GradientProducts, Products

pytestmark = pytest.mark.usefixtures("one_thread")

SUMS = {"accumulator": "bfloat16"}
BLOCKS = {**SUMS, "accumulator_rounded": "block"}
WIDE = {"operands": "float32", "probability": "float32", "exp": "vexp"}
HONEST = (
    Kernel(
        "every product", flat_numerics(**SUMS, exp="exp_u20", block_n=64), arch="cpu", dtypes=ALL
    ),
    Kernel("every block", flat_numerics(**BLOCKS, **WIDE, block_n=32), arch="cpu", dtypes=ALL),
    Kernel(
        "of P V alone",
        flat_numerics(**SUMS, score_accumulator="float32", row_sum_of="mma", block_n=32),
        arch="cpu",
    ),
    Kernel(
        "of scores alone",
        flat_numerics(score_accumulator="bfloat16", accumulator_rounded="block", **WIDE, block_n=0),
        arch="cpu",
        style="eager",
        dtypes=("float32",),
    ),
)
BACKWARDS = (
    BackwardKernel("every product", numerics(**SUMS), saver("cpu", **SUMS)),
    BackwardKernel("blocks added", numerics(**SUMS, group="cast"), saver("cpu"), style="partial"),
    BackwardKernel("of S and dP", numerics(score_accumulator="bfloat16", **FULL), saver("cpu")),
    BackwardKernel(
        "of gradients, D of weights",
        numerics(**SUMS, score_accumulator="float32", softmax_source="own"),
        saver("cpu"),
        dtypes=("float32", "bfloat16"),
    ),
)


@pytest.mark.first_look(1)
@pytest.mark.parametrize("kernel", HONEST, ids=lambda kernel: kernel.name)
def test_honest_forwards_stay_within_the_bound(kernel: Kernel) -> None:
    shapes = [shape for shape in SHAPES if suits(kernel, shape)]
    for turn, (dtype, distribution) in enumerate(itertools.product(kernel.dtypes, ordinary())):
        text = f"{shapes[turn * 5 % len(shapes)]},dtype={dtype},dist={distribution}"
        problem = Problem.parse(text)
        truth = truth_of(problem, kernel.numerics, kernel.arch)
        found = ratios(problem, emulate(problem, kernel, list(Luck)[turn % 2]), truth)
        assert found.worst <= 1, f"{kernel.name}: r = {found.worst:.3g} for {problem.name}"


@pytest.mark.first_look(1)
@pytest.mark.parametrize("kernel", BACKWARDS, ids=lambda kernel: kernel.name)
def test_honest_backwards_stay_within_the_bound(kernel: BackwardKernel) -> None:
    for n, (dtype, distribution) in enumerate(itertools.product(kernel.dtypes, ordinary())):
        text = f"{SHAPES_BACKWARD[n * 5 % len(SHAPES_BACKWARD)]},dtype={dtype},dist={distribution}"
        problem, honest = Problem.parse(text), kernel.but(wide=n % 3 == 0)
        saved, found = emulate_backward(problem, honest, list(Luck)[n % 2], NAMES[n % 3])
        truth = truth_of_backward(problem, saved, arithmetic(problem, honest))
        centre = nominal(problem, Inputs.of(problem), saved)
        for name in NAMES:
            moved = (centre[name] - getattr(truth, name)).abs()
            limit = getattr(truth, f"{name}_bound")
            # fp64 differs with the order; of what was saved as NaN the centre is NaN
            rest = limit - moved + 2e-14 * centre[name].abs()
            rest = torch.where(limit.isinf(), torch.inf, rest)
            output = arithmetic(problem, honest).output
            ratio = compare(found[name], centre[name], rest, output).worst
            assert ratio <= 1, f"{kernel.name}, {name}: r = {ratio:.3g} for {problem.name}"


def test_planted_faults_exceed_the_bound() -> None:
    for faulty, declared, text in (
        (HONEST[0], HONEST[0].but(accumulator="float32"), "sq=16,skv=96,d=64,dtype=bfloat16"),
        (
            HONEST[1].but(accumulator_rounded="product"),
            HONEST[1],
            "sq=16,skv=256,d=64,scale=0.01,dtype=float32,dist=v_mean",
        ),
    ):
        problem = Problem.parse(text)
        truth = truth_of(problem, declared.numerics, declared.arch)
        assert ratios(problem, emulate(problem, declared), truth).worst <= 1
        assert ratios(problem, emulate(problem, faulty), truth).worst > 1
    problem = Problem.parse("sq=96,skv=96,d=32,dtype=bfloat16,dist=v_mean")
    undeclared = BACKWARDS[0].but(accumulator="float32")
    found = ratios_backward(problem, BACKWARDS[0], undeclared, Luck.NEAREST, "dq")
    assert max(float(ratio.max()) for ratio in found.values()) > 1


def test_the_units() -> None:
    """One rounding of 2^-8 per product covers the fp32 addition and the cast."""
    for operands in ("float16", "bfloat16", "float32"):
        unit = unit_for("cpu", operands, "bfloat16")
        assert unit.accumulator == "bfloat16"
        assert unit.kappa(100) == pytest.approx((1 + 2.0**-8) ** 100 - 1)
        assert "bfloat16" in provenance("cpu", operands, "bfloat16").sentence
    with pytest.raises(ValueError, match="float8"):
        unit_for("cpu", "float8_e4m3fn", "bfloat16")


def test_the_words_show_in_the_bounds() -> None:
    text = "sq=20,skv=128,d=64,scale=0.02,dist=same_sign_v,dtype=bfloat16"
    found = [bound_of(text, flat_numerics(**changes), "cpu").out for changes in (SUMS, BLOCKS, {})]
    assert bool((found[0] > found[1]).all())
    assert bool((found[1] > found[2]).all())
    problem = Problem.parse("sq=24,skv=24,d=16,dtype=bfloat16")
    saved, _ = emulate_backward(problem, BACKWARDS[1])
    under = [
        tolerance_backward.resolve(numerics(**changes), Config(), problem, "cpu")
        for changes in (SUMS, {})
    ]
    truth = truth_of_backward(problem, saved, *under)
    assert truth.best_bounds is not None
    for name, best in zip(NAMES, truth.best_bounds, strict=True):
        assert bool((getattr(truth, f"{name}_bound") > best).all())


def test_nothing_is_asked_where_a_sum_may_overflow() -> None:
    changes = {**SUMS, "score_accumulator": "float32", "dtype": "bfloat16"}
    assert bool(with_operands([0.0], [0.0] * 3, [1e38] * 3, **changes).out.isfinite().all())
    assert bool(with_operands([0.0], [0.0] * 3, [1.2e38] * 3, **changes).out.isinf().all())


def test_oracles_whose_premise_is_broken_say_so(opened: Bench) -> None:
    declaration = opened.variants["right"]
    assert "accumulator = 'bfloat16'" in str(gather.excludes_backward(declaration))
    problem = SQUARE.but(dtype="bfloat16")
    assert declaration.gradients is not None
    forward = resolve(declaration.numerics, Config(), problem, "cpu")
    backward = tolerance_backward.resolve(declaration.gradients, Config(), problem, "cpu")
    assert "accumulator" in str(statistics.underived(forward))
    assert "accumulator" in str(statistics_backward.underived(backward))


@pytest.mark.parametrize(
    ("made", "changes", "message"),
    [
        (
            Products,
            {"accumulator_rounded": "row"},
            r"numerics\.products\.accumulator_rounded: 'row'",
        ),
        (
            GradientProducts,
            {"accumulator": "float16"},
            r"gradients\.products\.accumulator: 'float16'",
        ),
        (
            GradientProducts,
            {"score_accumulator": "tf32"},
            r"gradients\.products\.score_accumulator: 'tf32'",
        ),
    ],
)
def test_an_illegal_value_is_refused(made: type, changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(**changes)


def test_what_is_not_derived_is_refused() -> None:
    problem = Problem(seqlen_q=1, seqlen_kv=1, head_dim=16, dtype="float32")
    tf32 = {**SUMS, "float32_products": "tf32"}
    with pytest.raises(ValueError, match=r"numerics\.products\.accumulator: .*'bfloat16'"):
        resolve(flat_numerics(**tf32), Config(), problem, "sm_90")
    with pytest.raises(ValueError, match=r"gradients\.products\.float32_products: .*bfloat16"):
        tolerance_backward.resolve(flat_gradients(**tf32), Config(), problem, "sm_90")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    torch.set_num_threads(1)
    with bench("bfloat16_sums.py", tmp_path_factory.mktemp("sums")) as found:
        yield found


@pytest.mark.parametrize("name", ["right", "right-by-block"])
def test_a_right_kernel_passes(name: str, opened: Bench) -> None:
    problem = SQUARE.but(dtype="bfloat16")
    for oracle in ("bound", "repeat", "execution", "memory"):
        verdict = opened.verdict(name, "accuracy", oracle, problem)
        assert verdict.outcome == "pass", verdict.finding
    for group, one in (
        ("poison", problem.but(mask=Causal())),
        ("power_of_two", problem.but(distribution="octaves")),
        ("gather", problem.but(distribution="gather", mask=Lengths((24, 3), (9, 7)))),
        ("counting", problem.but(distribution="counting")),
        ("declared_numerics", asks(opened.variants[name], problem.dtype)[0]),
    ):
        verdict = opened.verdict(name, group, group, one)
        assert verdict.outcome == "pass", verdict.finding
    if name == "right":
        verdict = opened.verdict(name, "gradients", "gradient_bound", problem)
        assert verdict.outcome == "pass", verdict.finding


def test_a_wrong_one_is_convicted(opened: Bench) -> None:
    problem = SQUARE.but(dtype="bfloat16")
    for name, group, oracle, one in (
        ("declares-fp32", "accuracy", "bound", problem.but(softmax_scale=1.0)),
        (
            "rounds-more-often",
            "accuracy",
            "bound",
            SQUARE.but(distribution="v_mean", seqlen_kv=512, softmax_scale=1e-3, mask=Full()),
        ),
        ("declares-fp32-backward", "gradients", "gradient_bound", problem.but(softmax_scale=1.0)),
        ("declares-fp32", "declared_numerics", "declared_numerics", None),
    ):
        asked = one or asks(opened.variants[name], problem.dtype)[0]
        verdict = opened.verdict(name, group, oracle, asked)
        assert verdict.outcome == "fail", (name, verdict)
