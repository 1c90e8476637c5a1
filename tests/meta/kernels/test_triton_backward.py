"""The Triton backward against its bounds, in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.kernels.triton_backward_cases import CASES, NAMES

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def outcomes():
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "tests.meta.kernels.triton_backward_cases"]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return {outcome["name"]: outcome for outcome in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_within_bounds_whole_and_repeatable(outcomes, name):
    assert not outcomes[name]["failures"]


def test_something_was_judged(outcomes):
    """No gradient is exact everywhere, nor bound by infinity."""
    for n, gradient in enumerate(NAMES):
        assert 0.1 < max(outcome["ratios"][n] for outcome in outcomes.values()) <= 1, gradient
