"""Backwards whose D is the sum of P dP, of a P from the saved LSE: right ones pass, and what they
declare is held against them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from references.masks import Causal, Lengths
from references.score_mods import Softcap
from tests.harness.backward_inputs import Inputs, exact, nominal
from tests.harness.declared import flat_gradients, with_fields
from tests.harness.emulation import Luck, Result
from tests.harness.emulation_backward import NAMES, BackwardKernel, emulate
from tests.harness.honest_backwards import FULL, SHAPES, arithmetic, numerics, saver
from tests.harness.honest_backwards import truth_of as exact_truth_of
from tests.harness.property_cases import Bench, bench
from tests.meta.judging.test_metamorphic import SQUARE
from verify.judging.comparison import compare
from verify.oracles import gather
from verify.oracles.long import long_columns
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.statistics.gradients import underived
from verify.tolerance.backward import GradientTruth, resolve
from verify.variant import Config

pytestmark = pytest.mark.usefixtures("one_thread")

OF_WEIGHTS = {"delta_of": "weights"}
HONEST = (
    BackwardKernel("16 bits", numerics(**OF_WEIGHTS), saver()),
    BackwardKernel("everything in fp32", numerics(**OF_WEIGHTS, **FULL), saver(), apart=True),
    BackwardKernel(
        "of rounded P, D in 16 bits",
        numerics(**OF_WEIGHTS, score_gradient_of="rounded", delta="input"),
        saver("sm_80"),
        style="partial",
    ),
    BackwardKernel("fp32", numerics(**OF_WEIGHTS), saver(), natural=True, dtypes=("float32",)),
    BackwardKernel(
        "CPU, 16 bits", numerics(**OF_WEIGHTS, exp="fexp_u20"), saver("cpu", exp="exp_u20")
    ),
    BackwardKernel("__expf", numerics(**OF_WEIGHTS, exp="__expf"), saver()),
)
HALF = SQUARE.but(dtype="bfloat16")
PROBLEMS = {
    "full": HALF,
    "fp32": SQUARE,
    "capped": HALF.but(score_mod=Softcap(1.0)),
    "empty rows": HALF.but(mask=Lengths((24, 3), (0, 7))),
    "negative scale": HALF.but(softmax_scale=-0.7, dtype="float16", mask=Causal()),
    "one key": HALF.but(seqlen_kv=1),
}
FAULTS = {
    "without-a-key": "dq is off by",
    "reads-the-output": "dq is off by nan",
    "of-rounded": "is off by",
}


def truth_of(
    problem: Problem, kernel: BackwardKernel, *run: object
) -> tuple[dict[str, torch.Tensor], GradientTruth, Result]:
    """Gradients of one emulated run, and their truth by the saved LSE and the exact O."""
    saved, found = emulate(problem, kernel, *run)
    start = replace(saved, out=exact(problem, Inputs.of(problem)).out)
    return found, exact_truth_of(problem, start, arithmetic(problem, kernel)), saved


@pytest.mark.first_look(2)
@pytest.mark.parametrize("kernel", HONEST, ids=lambda kernel: kernel.name)
def test_honest_kernels_stay_within_the_bound(kernel: BackwardKernel) -> None:
    """As those of `test_tolerance_backward`: around the nominal gradients, where no error hides."""
    turn, lucks, aims = itertools.count(), itertools.cycle(Luck), itertools.cycle(NAMES)
    for dtype, distribution in itertools.product(kernel.dtypes, ordinary()):
        n = next(turn)
        text = f"{SHAPES[n * 5 % len(SHAPES)]},dtype={dtype},dist={distribution}"
        problem, honest = Problem.parse(text), kernel.but(wide=n % 3 == 0)
        found, truth, saved = truth_of(problem, honest, next(lucks), next(aims))
        centre = nominal(problem, Inputs.of(problem), saved, of_weights=True)
        for name in NAMES:
            limit = getattr(truth, f"{name}_bound")
            moved = (centre[name] - getattr(truth, name)).abs()
            # fp64 differs with the order
            rest = limit - moved + 2e-14 * centre[name].abs()
            # of what was saved as NaN the centre is NaN
            rest = torch.where(limit.isinf(), torch.inf, rest)
            output = arithmetic(problem, honest).output
            ratio = compare(found[name], centre[name], rest, output).worst
            assert ratio <= 1, f"{kernel.name}, {name}: r = {ratio:.3g} for {problem.name}"


@pytest.mark.parametrize("fault", ["D without its last key", "D of the next row"])
def test_planted_faults_exceed_the_bound(fault: str) -> None:
    problem = Problem.parse("sq=48,skv=96,d=64,dtype=bfloat16")
    found, truth, _ = truth_of(problem, HONEST[0].but(fault=fault))
    worst_of = max(
        compare(found[n], getattr(truth, n), getattr(truth, f"{n}_bound"), problem.format).worst
        for n in NAMES
    )
    assert worst_of > 1


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench("delta_of_weights.py", tmp_path_factory.mktemp("delta")) as found:
        yield found


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_right_backward_passes(name: str, opened: Bench) -> None:
    for oracle in ("gradient_bound", "gradient_sums", "repeat", "execution", "memory"):
        verdict = opened.verdict("right", "gradients", oracle, PROBLEMS[name])
        assert verdict.outcome == "pass", verdict.finding


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_one_is_convicted(fault: str, opened: Bench) -> None:
    verdict = opened.verdict(fault, "gradients", "gradient_bound", HALF.but(softmax_scale=0.3))
    assert verdict.finding is not None
    assert FAULTS[fault] in verdict.finding.message


def test_oracles_whose_premise_is_broken_say_so(opened: Bench) -> None:
    """exp(S - LSE^) of a rounded LSE^ is not 1, so that D is not dP where one key wins its row."""
    declaration = opened.variants["right"]
    assert "delta_of = 'weights'" in str(gather.excludes_backward(declaration))
    oracle = next(one for one in long_columns.ORACLES if one.name == "long_columns")
    assert oracle.excludes is not None
    assert "sums up D" in str(oracle.excludes(declaration))
    assert declaration.gradients is not None
    assert "delta_of" in str(underived(resolve(declaration.gradients, Config(), HALF, "cpu")))


def test_the_word_shows_in_the_bounds() -> None:
    """D as a sum over keys of weights that err is known worse than that of a saved O."""
    honest = numerics(**FULL)
    problem = Problem.parse("sq=33,skv=200,d=32,dtype=float16")
    saved, _ = emulate(problem, HONEST[1])
    under = [
        resolve(with_fields(honest, delta_of=name), Config(), problem, "sm_90")
        for name in ("weights", "output")
    ]
    found = exact_truth_of(problem, saved, *under)
    assert found.best_bounds is not None
    assert bool((found.dq_bound > found.best_bounds[0]).all())


def test_an_illegal_value_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"gradients\.score_gradient\.delta_of: 'scores' is none of output, weights",
    ):
        flat_gradients(delta_of="scores")
