"""The Triton backward against its bounds, in Triton's interpreter."""

import json
from pathlib import Path

import pytest

from tests.harness.interpreter_child import in_child
from tests.meta.kernels.triton_backward_cases import CASES, NAMES

ROOT = Path(__file__).resolve().parents[3]


def interpreted(module):
    """What that module prints where Triton interprets, each line as JSON."""
    done = in_child("-m", f"tests.meta.kernels.{module}")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def outcomes():
    return {outcome["name"]: outcome for outcome in interpreted("triton_backward_cases")}


def test_blocks_come_in_the_declared_order():
    """One that takes the first block last is convicted, and allowed if no order is declared."""
    ((own, other, undeclared),) = interpreted("triton_backward_order")
    assert own <= 1 < other
    assert undeclared <= 1


@pytest.mark.for_ci
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_within_bounds_whole_and_repeatable(outcomes, name):
    assert not outcomes[name]["failures"]


@pytest.mark.for_ci
def test_something_was_judged(outcomes):
    """No gradient is exact everywhere, nor bound by infinity."""
    for n, gradient in enumerate(NAMES):
        assert 0.1 < max(outcome["ratios"][n] for outcome in outcomes.values()) <= 1, gradient
