"""`bound` judges O by what is known of it: where an order of keys is declared, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.harness.emulation import Kernel, emulate
from tests.harness.fake_trials import OK, acquitted, convicted, trial_of
from tests.harness.ordered_forwards import HALVES, ordered, problem_of
from verify.evidence import Finding
from verify.judging.findings import Ruling
from verify.judging.invariants import KNOWN, beyond
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.oracles import bound
from verify.variant import Config, Numerics

ORDINARY = "sq=48,skv=200,d=64"
WINDOW = "sq=64,skv=128,d=64,mask=window.50.20"
ASCENDING = ordered("ascending")
pytestmark = pytest.mark.usefixtures("one_thread")


def tried(kernel: Kernel, declared: Numerics, dtype: str, shape: str = ORDINARY) -> Trial:
    """The trial of an emulated kernel, whatever it declares, on Hopper."""
    problem = problem_of(shape, dtype)
    trial = replace(trial_of(problem, numerics=declared), config=Config(block_m=32), arch="sm_90")
    result = emulate(problem, kernel)
    trial.launches["first"] = Launch(OK, "nan", {"out": result.out, "lse": result.lse})
    return trial


def ruling(kernel: Kernel, declared: Kernel, dtype: str, shape: str = ORDINARY) -> Ruling:
    return bound.judge(tried(kernel, declared.numerics, dtype, shape))


@pytest.mark.parametrize("dtype", HALVES)
def test_an_honest_kernel_passes_and_is_measured(dtype: str) -> None:
    found = ruling(ASCENDING, ASCENDING, dtype)
    assert acquitted(found)
    assert 0 < found.measures["lattice_out"] <= 1
    assert 0 < found.measures["single_out"] < 1


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("fault", ["P truncated", "O truncated", "stale maximum"])
def test_a_fault_is_convicted_where_an_order_is_declared(fault: str, dtype: str) -> None:
    wrong = ASCENDING.but(fault=fault)
    found = ruling(wrong, ASCENDING, dtype)
    assert convicted(found)
    assert isinstance(found.finding, Finding)
    assert "no rounding of what P V gives" in found.finding.message
    silent = ruling(wrong, ASCENDING.but(key_order="any"), dtype)
    assert acquitted(silent)
    assert "lattice_out" not in silent.measures


def test_a_kernel_that_rounds_less_passes() -> None:
    """P in fp32, exact results, and smaller tiles than the config's."""
    assert acquitted(ruling(ASCENDING.but(probability="float32"), ASCENDING, "bfloat16"))
    trial = tried(ASCENDING, ASCENDING.numerics, "bfloat16")
    trial.first.outputs["out"].copy_(trial.truth.out)
    assert acquitted(bound.judge(trial))
    whole_first = ordered("whole blocks first", "whole_first", block_n=16)
    assert acquitted(ruling(whole_first, whole_first, "bfloat16", WINDOW))
    ascending = whole_first.but(key_order="ascending")
    assert convicted(ruling(ascending, whole_first, "bfloat16", WINDOW))


def test_an_order_switches_no_oracle_off() -> None:
    for kernel in (ASCENDING, ASCENDING.but(split_keys=True, parts=2)):
        assert beyond(kernel.numerics, KNOWN) is None
    assert beyond(ASCENDING.but(maximum_lag=8.0).numerics, KNOWN) is not None


def test_rows_without_a_key_are_not_judged_here() -> None:
    shape = "sq=40,skv=20,d=16,mask=causal"
    trial = tried(ASCENDING, ASCENDING.numerics, "float16", shape)
    trial.first.outputs["out"][trial.truth.empty] = torch.nan
    found = bound.judge(trial)
    assert acquitted(found)
    assert found.measures["lattice_out"] <= 1
