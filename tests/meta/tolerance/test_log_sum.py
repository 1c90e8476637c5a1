"""LSE = ln 2 (m + log2 l): its bound where the last steps are declared, and its lattice.

`python3 -m tests.log_sum_sweep` judges as many rows as it is asked for.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.triton import flash_forward
from tests import log_sum_sweep
from tests.harness.emulation import Kernel, Luck, emulate
from tests.harness.fake_trials import OK, convicted, trial_of
from tests.log_sum_sweep import SHAPES, judged, kernels
from tests.meta.tolerance.test_tolerance import truth_of
from verify.evidence import Finding
from verify.judging.known_forward import base2_reach, explained_lse, judge_lse, natural_reach
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.judging.truth import compute_truth
from verify.oracles import bound
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.problem.inputs import dequantised, tensors
from verify.tolerance.arithmetic import U
from verify.tolerance.forward_maxima import rescaling_blocks
from verify.tolerance.resolution import resolve
from verify.variant import Config, Contract

KINDS = {kernel.name: kernel for kernel in kernels()}
ASCENDING = KINDS["ascending, in order, sm_80"]

pytestmark = pytest.mark.usefixtures("one_thread")


def trial_for(
    problem: Problem, kernel: Kernel, lse: Tensor, out: Tensor, **changes: object
) -> Trial:
    trial = trial_of(problem, numerics=kernel.numerics, **changes)
    trial.arch = kernel.arch
    trial.config = replace(trial.config, block_n=None)
    trial.launches["first"] = Launch(OK, "nan", {"out": out, "lse": lse})
    return trial


@pytest.mark.for_ci
def test_honest_kernels_stay_within_the_bound_and_on_the_lattice() -> None:
    """Each arithmetic on a few distributions and shapes, in turn."""
    turns = itertools.count()
    cases = list(itertools.product(ordinary(), SHAPES))
    for kernel in kernels():
        for dtype in kernel.dtypes:
            luck = (Luck.AGAINST, Luck.NEAREST)[next(turns) % 3 == 0]
            distribution, shape = cases[next(turns) * 7 % len(cases)]
            out = ",out=bfloat16" if "float8" in dtype else ""
            text = f"{shape},dtype={dtype}{out},dist={distribution},seed=1"
            found = judged(Problem.parse(text), kernel, luck)
            assert max(found.ratio, found.lattice) <= 1, f"{kernel.name}, {text}, {luck}: {found}"
            assert found.sharper >= 1


@pytest.mark.parametrize(
    ("name", "least"),
    [("in order, four lanes", 1.3), ("ascending", 1.2), ("ascending, in order, sm_80", 2.0)],
)
def test_the_bound_is_so_much_sharper(name: str, least: float) -> None:
    problem = Problem.parse("sq=60,skv=200,d=64,dtype=float16,dist=normal,seed=1")
    assert judged(problem, KINDS[name], Luck.NEAREST).sharper >= least


def planted(fault: str, lse: Tensor) -> Tensor:
    """An LSE with a fault that the bound of any way to make it allows."""
    if fault == "ln 2 with a wrong digit":
        return (lse.double() / math.log(2) * 0.6931462).float()
    if fault == "rescales of 1 - 2 ulp":
        return lse - 24 * 2.5 * 2.0**-23
    raise AssertionError(fault)


@pytest.mark.parametrize("fault", ["ln 2 with a wrong digit", "rescales of 1 - 2 ulp"])
def test_faults_that_any_bound_allows_are_convicted(fault: str) -> None:
    text = "sq=40,skv=200,d=16,dtype=float16,dist=normal,seed=3"
    kernel = ASCENDING.but(block_n=8)
    problem = Problem.parse(text)
    made = emulate(problem, kernel)
    wrong = planted(fault, made.lse)
    plain = truth_of(problem, kernel.but(row_sum_lse="any").numerics, kernel.arch)
    error = (wrong.double() - plain.lse).abs()
    assert bool((error <= plain.lse_bound).all())
    honest = trial_for(problem, kernel, made.lse, made.out)
    assert bound.judge(honest).finding is None
    finding = convicted(bound.judge(trial_for(problem, kernel, wrong, made.out)), "lse")
    assert finding.count > 20


def test_the_lattice_is_of_the_contracts_base() -> None:
    """In base 2 the sum is the last step; natural, the product."""
    lse, reach = torch.tensor([5.0], dtype=torch.float64), torch.tensor([1e-6], dtype=torch.float64)
    middle, far = natural_reach(lse, reach)
    assert float(middle) == 5.0
    assert 1.09 * 5 * U < float(far - reach) < 1.11 * 5 * U
    middle, far = base2_reach(lse, reach)
    assert float(middle) == pytest.approx(5 / math.log(2))
    assert float(far) == pytest.approx(1e-6 / math.log(2))


@pytest.mark.parametrize("base", ["natural", "base2"])
def test_an_lse_beyond_its_lattice_is_convicted_although_it_is_within_its_bound(base: str) -> None:
    problem = Problem.parse("sq=30,skv=40,d=16,dtype=float16,dist=normal,seed=3")
    kernel = ASCENDING
    truth = truth_of(problem, kernel.numerics, kernel.arch)
    made = emulate(problem, kernel)
    factor = 1 / math.log(2) if base == "base2" else 1.0
    contract = Contract(lse=base)
    right = (truth.lse * factor).float()
    honest = trial_for(problem, kernel, right, made.out, contract=contract)

    def of_lattice(lse: Tensor) -> tuple[Finding | None, dict[str, float]]:
        told = explained_lse(honest.truth, lse, base == "base2", 1)
        assert told is not None
        return judge_lse(honest, lse, told[0])

    assert of_lattice(right)[0] is None
    assert of_lattice(right)[1]["lattice_lse"] < 1
    # The largest number that the bound allows.
    far = torch.nextafter(
        ((truth.lse + truth.lse_bound) * factor).float(), torch.tensor(-torch.inf)
    )
    assert bool(((far.double() / factor - truth.lse).abs() <= truth.lse_bound).all())
    finding, measures = of_lattice(far)
    if base == "base2":  # the bound has the product that is not made
        assert finding is not None
        assert "no rounding of ln 2 (m + log2 l)" in finding.message
        assert measures["lattice_lse"] > 1
    beyond, _ = of_lattice(((truth.lse + 1.2 * truth.lse_bound) * factor).float())
    assert beyond is not None


def test_blocks_that_can_change_the_maximum_are_counted() -> None:
    """Scores that rise with the key change it in every block, scores that fall in none but the
    first; near ties count."""
    from references.row_blocks import row_blocks

    problem = Problem.parse("sq=3,skv=64,d=16,dtype=float32,scale=1.0")
    q, v = torch.ones(1, 1, 3, 16), torch.ones(1, 1, 64, 16)
    for order, rising, wanted in (
        ("ascending", True, 8),
        ("ascending", False, 1),
        ("descending", True, 1),
        ("descending", False, 8),
    ):
        k = torch.arange(64.0)[:, None].expand(64, 16)[None, None] * (1 if rising else -1)
        kernel = ASCENDING.but(key_order=order, block_n=8)
        a = resolve(kernel.numerics, Config(), problem, "sm_90")
        (block,) = row_blocks(q, k, v, problem.attention)
        for error, expected in ((0.0, wanted), (1e6, 8)):
            given = torch.full((1, 3, 1), error, dtype=torch.float64)
            found = rescaling_blocks(block, a, problem, given)
            assert found is not None
            assert found.flatten().tolist() == [expected] * 3


@pytest.mark.parametrize("order", ["ascending", "whole_first", "any"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_problem_that_is_judged_in_parts_has_the_same_bound(
    order: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts begin with a block of keys, not with the first key that they see."""
    problem = Problem.parse(f"hq=2,sq=70,skv=90,d=16,dtype={dtype},mask=window.20.3,seed=1")
    numerics = ASCENDING.but(key_order=order, block_n=16).numerics
    whole = truth_of(problem, numerics, "sm_90")
    monkeypatch.setattr("verify.tolerance.forward._PART", 300)
    parts = truth_of(problem, numerics, "sm_90")
    assert whole.lse_reach is not None
    assert parts.lse_reach is not None
    assert torch.allclose(whole.lse_bound, parts.lse_bound, rtol=1e-6, atol=0)
    assert torch.allclose(whole.lse_reach, parts.lse_reach, rtol=1e-6, atol=0)


def test_scores_that_may_overflow_have_no_bound_and_no_nan() -> None:
    problem = Problem.parse("sq=20,skv=40,d=16,dtype=bfloat16,scale=1e37,seed=1")
    truth = truth_of(problem, ASCENDING.numerics, "sm_90")
    assert truth.lse_reach is not None
    assert not bool(truth.lse_bound.isnan().any() | truth.lse_reach.isnan().any())
    assert bool((truth.lse_bound.isfinite() >= truth.lse_reach.isfinite()).all())


def test_merged_parts_gain_nothing() -> None:
    kernel = ASCENDING.but(style="split", split_keys=True)
    problem = Problem.parse("sq=3,skv=64,d=16,dtype=float16")
    assert truth_of(problem, kernel.numerics, kernel.arch).lse_reach is None


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_that_see_keys_from_the_middle_of_a_block_on(dtype: str) -> None:
    """Maxima are those of whole blocks, also where no interval of O is asked for."""
    problem = Problem.parse(f"sq=400,skv=1603,d=16,dtype={dtype},mask=window.450.0,seed=3")
    config = flash_forward.VARIANT.configs[0]
    arithmetic = resolve(flash_forward.VARIANT.numerics, config, problem, "sm_90a")
    assert arithmetic.rescales_by_one
    inputs = dequantised(problem, tensors(problem))
    truth = compute_truth(problem, inputs, [arithmetic.without_interval])
    assert truth.lse_reach is not None
    assert bool((truth.lse_reach < truth.lse_bound).all())


def test_the_sweep_refuses_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rows", "100", "--climb", "1", "--only", "ascending, in order, sm_80, up"]
    assert log_sum_sweep.main(words) == 0
    assert "0 problems refused" in capsys.readouterr().out
    wrong = ASCENDING.but(fault="drops the last key", name=words[-1], dtypes=("float16",))
    monkeypatch.setattr(log_sum_sweep, "kernels", lambda: (wrong,))
    assert log_sum_sweep.main(words) == 1
    assert "REFUSED" in capsys.readouterr().out
