"""Backwards that make a softmax of their own, by autograd: a right one passes, and what it declares
is held against it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from references.masks import Causal, Lengths
from references.score_mods import Softcap
from tests.harness.declared import flat_gradients, with_fields
from tests.harness.fake_trials import acquitted, convicted, trial_of
from tests.harness.property_cases import SAMPLES, Bench, bench
from tests.meta.judging.test_metamorphic import SQUARE
from verify.arithmetic.dtypes import dtype_named
from verify.campaign.targets import Target
from verify.cell.discovery import roster
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.oracles import bound, gather, gradient_sums
from verify.oracles.long import long_columns
from verify.problem import Problem
from verify.tolerance.backward import gradient_truth, resolve
from verify.variant import Config, Contract, GradientNumerics

torch.set_num_threads(1)

OWN = flat_gradients(softmax_source="own", block_m=0, block_n=0)
HALF = SQUARE.but(dtype="bfloat16")
FAULTS = {
    "without-delta": "dq is off by",
    "reads-what-was-saved": "dq is off by nan",
    "rounded-scale": "is off by",
}


@pytest.fixture(scope="module")
def autograd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench("own_softmax.py", tmp_path_factory.mktemp("own")) as opened:
        yield opened


PROBLEMS = {
    "full": HALF,
    "fp32": SQUARE,
    "capped": HALF.but(score_mod=Softcap(1.0)),
    "empty rows": HALF.but(mask=Lengths((24, 3), (0, 7))),
    "negative scale": HALF.but(softmax_scale=-0.7, dtype="float16", mask=Causal()),
    "one key": HALF.but(seqlen_kv=1),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_right_function_passes(name: str, autograd: Bench) -> None:
    for oracle in ("gradient_bound", "gradient_sums", "repeat", "execution", "memory"):
        verdict = autograd.verdict("right", "gradients", oracle, PROBLEMS[name])
        assert verdict.outcome == "pass", verdict.finding


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_one_is_convicted(fault: str, autograd: Bench) -> None:
    verdict = autograd.verdict(fault, "gradients", "gradient_bound", HALF.but(softmax_scale=0.3))
    assert verdict.finding is not None
    assert FAULTS[fault] in verdict.finding.message


def test_no_forward_is_asked_for_what_nobody_reads(autograd: Bench) -> None:
    verdict = autograd.verdict("right", "gradients", "gradient_bound", HALF)
    assert verdict.measures["r_dq"] > 0
    trial = own_trial(HALF)
    assert trial.saved.reply.ok
    assert all(bool(tensor.isnan().all()) for tensor in trial.saved.outputs.values())
    out, lse = trial.start
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench("own_alone.py", tmp_path_factory.mktemp("alone")) as opened:
        yield opened


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_backward_alone_needs_no_forward(name: str, alone: Bench) -> None:
    declaration = alone.variants["right"]
    assert (declaration.entries, declaration.contract.lse) == (("backward",), None)
    for group in ("gradients", "gradient_slice", "gradient_linearity", "relaunch_backward"):
        target = Target(declaration, declaration.configs[0], PROBLEMS[name].dtype, group)
        problem = PROBLEMS[name].but(batch=2) if name != "empty rows" else PROBLEMS[name]
        for verdict in alone.judge.judge(target, problem):
            assert verdict.outcome != "fail", verdict.finding


def test_a_wrong_backward_alone_is_convicted(alone: Bench) -> None:
    verdict = alone.verdict("without-delta", "gradients", "gradient_bound", HALF)
    assert verdict.finding is not None
    assert "dq is off by" in verdict.finding.message


def own_trial(problem: Problem, numerics: GradientNumerics = OWN) -> Trial:
    """A trial with neither forward nor cell, whose gradients are exact."""
    trial = trial_of(problem, Contract(lse=None), gradients=numerics, entries=("backward",))
    trial.entry = "backward"
    exact = {
        name: getattr(trial.gradients, name).to(problem.format.torch) for name in ("dq", "dk", "dv")
    }
    trial.launches["first"] = Launch(trial.saved.reply, "nan", exact)
    return trial


def test_exact_gradients_pass_and_others_do_not() -> None:
    for oracle in (bound.BACKWARD, gradient_sums.ORACLE):
        trial = own_trial(HALF)
        assert acquitted(oracle.judge(trial))
        trial.first.outputs["dk"][0, 0, 2] += 1.0
        convicted(oracle.judge(trial))


def test_the_winner_of_a_row_has_all_its_weight() -> None:
    """P = exp(0) / 1 however the scores were rounded: no slack for an LSE."""
    problem = HALF.but(distribution="gather_integers", softmax_scale=1.0)
    trial = own_trial(problem)
    assert gather.excludes_backward(trial.declaration) is None
    assert acquitted(gather.judge_backward(trial))
    dv = trial.first.outputs["dv"]
    dv[dv != 0] *= 1 + 2**-7
    convicted(gather.judge_backward(trial), "dv is")


def test_columns_alone_say_too_little() -> None:
    """A key's dK and dV owe their errors to rows of all keys, which are not looked at where keys
    are chosen."""
    oracle = next(oracle for oracle in long_columns.ORACLES if oracle.name == "long_columns")
    assert oracle.excludes is not None
    assert "its own softmax" in str(oracle.excludes(own_trial(HALF).declaration))


def test_bounds_of_an_own_softmax_cost_little_precision() -> None:
    """Of P and dS in 16 bits they are those of a saved one, but for fp32's share."""
    for name, ratio in ratios_to_saved(HALF, OWN).items():
        assert ratio == pytest.approx(1, abs=0.01), name


def test_what_all_weights_of_a_row_have_in_common_is_divided_out() -> None:
    """Scores that are large and known badly, fp32 inside: one weight is near 1 however the scores
    err, and D near its dP."""
    wide = with_fields(OWN, probability="float32", score_gradient_dtype="float32")
    ratios = ratios_to_saved(
        HALF.but(head_dim=64, head_dim_v=64, softmax_scale=4.0, dtype="float16"), wide
    )
    assert ratios["dq"] <= 1.5
    assert ratios["dk"] <= 2


def test_d_in_16_bits_is_rounded_where_o_is_0() -> None:
    """P dP of two keys cancels but for its errors, which the cast of D rounds below the normal
    range."""
    problem = Problem(
        seqlen_q=1, seqlen_kv=2, head_dim=1, head_dim_v=1, dtype="float16", softmax_scale=1.0
    )
    q, v = torch.full((1, 1, 1, 1), 2.0**12), torch.tensor([1.0, -1.0]).view(1, 1, 2, 1)
    k, out, lse = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), 0.6931471)
    wide = with_fields(OWN, probability="float32", score_gradient_dtype="float32")
    under = [
        replace(
            resolve(with_fields(wide, delta=name), Config(), problem, "sm_90"),
            output=dtype_named("float32"),
        )
        for name in ("input", "float32")
    ]
    dout = torch.ones(1, 1, 1, 1)
    found = gradient_truth(problem, q, k, v, dout, out.double(), lse.double(), *under)
    assert found.best_bounds is not None
    cast = 2.0**12 * 0.5 * 2.0**-25
    assert bool((found.dk_bound >= found.best_bounds[1] + 0.9 * cast).all())


def ratios_to_saved(problem: Problem, numerics: GradientNumerics) -> dict[str, float]:
    """Median ratio of each bound to that of a backward that starts from a saved LSE, which is
    exact."""
    trial = own_trial(problem)
    q, k, v = trial.expanded
    own, saved = (
        resolve(with_fields(numerics, softmax_source=name), Config(), problem, "sm_90")
        for name in ("own", "saved")
    )
    found = gradient_truth(problem, q, k, v, trial.dout, *trial.start, own, saved)
    assert found.best_bounds is not None
    bounds = zip(
        ("dq", "dk", "dv"),
        (found.dq_bound, found.dk_bound, found.dv_bound),
        found.best_bounds,
        strict=True,
    )
    return {name: float((bound / other)[other > 0].median()) for name, bound, other in bounds}


def test_an_overflow_anywhere_in_a_row_leaves_nothing_to_ask() -> None:
    """A masked dP or score that overflows is part of D and of the row sum, as 0 times infinity."""
    problem = Problem(
        seqlen_q=2,
        seqlen_kv=2,
        head_dim=1,
        head_dim_v=1,
        dtype="bfloat16",
        mask=Causal(),
        softmax_scale=1.0,
    )
    one = torch.ones(1, 1, 2, 1, dtype=torch.float64)
    last = torch.tensor([1.0, 3e38], dtype=torch.float64).view(1, 1, 2, 1)
    under = resolve(OWN, Config(), problem, "sm_90")

    def spared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> list[bool]:
        # The first row sees the first key alone, and the last key is the one with large elements.
        lse = torch.tensor([float((q * k)[0, 0, 0, 0]), 0.0], dtype=torch.float64).view(1, 1, 2)
        found = gradient_truth(problem, q, k, v, dout, v.clone(), lse, under)
        return found.dq_bound[0, 0, :, 0].isfinite().tolist()

    assert spared(one, one, one, one) == [True, True]
    assert spared(one, one, last, 8 * one)[0] is False
    assert spared(8 * one, last, one, one)[0] is False


def test_only_a_backward_that_reads_an_lse_needs_one(tmp_path: Path) -> None:
    found = roster([SAMPLES / "own_softmax.py"])
    assert not found.failures
    assert all(declaration.contract.lse is None for declaration in found.declarations)
    source = (SAMPLES / "own_softmax.py").read_text().replace('source="own", ', "")
    (tmp_path / "reads.py").write_text(source)
    assert "a backward needs the LSE" in str(roster([tmp_path / "reads.py"]).failures)
