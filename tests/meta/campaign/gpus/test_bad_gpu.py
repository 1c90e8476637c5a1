"""A run on two GPUs of which one computes wrongly: it is named, what it judged does not count, and
the other one judges all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.harness import commands
from tests.harness.bad_gpu import BAD, GOOD, LATER, fake_smi
from verify.bundle import ROOT
from verify.campaign.gpus import state
from verify.evidence import load

PLAIN = ROOT / "tests" / "sample_kernels" / "correct_plain.py"
CHOICES = ("-n", "2", "--profile", "dev", "--examples", "2", "--dtype", "float32", "--run-id", "a")
FEW = "counts_the or gathers_the"  # two tests with cases: one for each worker


@pytest.mark.for_ci
@pytest.mark.parametrize("later", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_bad_gpu_is_named_and_the_other_one_judges_all(tmp_path: Path, later: bool) -> None:
    variables = {
        "PATH": f"{fake_smi(tmp_path)}:{os.environ['PATH']}",
        "PYTEST_ADDOPTS": "-p tests.harness.bad_gpu",
        **({LATER: str(tmp_path)} if later else {}),
    }
    done = commands.verify("run", PLAIN, "-k", FEW, *CHOICES, cwd=tmp_path, variables=variables)
    assert done.returncode == 0, done.stdout
    assert f"{BAD} is quarantined: the control problem is wrong in 1 of 256 rows" in done.stdout
    assert f"goes on with {GOOD}" in done.stdout

    run = tmp_path / ".verify" / "runs" / "a"
    good, bad = json.loads((run / "accounting.json").read_text())
    assert (good["device"], bad["device"]) == (GOOD, BAD)
    assert good["cases"] >= 4
    assert (good["failing"], good["quarantined"]) == (0, "")
    assert bad["failing"] > 0 or not later
    assert "is wrong" in bad["quarantined"]
    assert not state.files_of(run, BAD)
    assert bool(state.files_of(run, BAD, out=True)) == bool(bad["workers"])
    evidence = load(run)
    assert {verdict.outcome for verdict in evidence.verdicts} <= {"pass", "inapplicable"}

    # The run can go on, and does so without it; a machine with no other one is refused.
    variables["CUDA_VISIBLE_DEVICES"] = BAD
    done = commands.verify("run", PLAIN, "-k", FEW, *CHOICES, cwd=tmp_path, variables=variables)
    assert done.returncode == 2, done.stdout
    assert "has quarantined every visible GPU" in done.stdout
