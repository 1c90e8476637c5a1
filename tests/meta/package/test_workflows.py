"""The workflows run what CI runs by hand, and name no file or stage that is not there."""

from __future__ import annotations

import os
import re
import tomllib

import pytest

from verify.bundle import ROOT

FOLDER = ROOT / ".github" / "workflows"
CI = (FOLDER / "ci.yml").read_text(encoding="utf-8")
GPU = (FOLDER / "gpu.yml").read_text(encoding="utf-8")


def test_ci_runs_the_script_for_the_oldest_python_that_is_allowed() -> None:
    assert "\n      - run: .ci/run\n" in CI
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = project["requires-python"].removeprefix(">=")
    assert f'python: ["{oldest}"' in CI


def test_the_gpu_workflow_names_stages_that_there_are() -> None:
    (stages,) = re.findall(r'\.ci/gpu out "\$SECONDS_GIVEN" ([\w ]+)$', GPU, re.MULTILINE)
    script = (ROOT / ".ci" / "gpu").read_text(encoding="utf-8")
    (known,) = re.findall(r"^        (ptx \| [\w |]+)\) judge", script, re.MULTILINE)
    families = set(known.split(" | "))
    for stage in stages.split():
        assert stage in families or f"        {stage}) " in script, stage


@pytest.mark.parametrize("text", [CI, GPU], ids=["ci", "gpu"])
def test_scripts_can_be_run_and_inputs_reach_no_shell(text: str) -> None:
    for name in re.findall(r"\.ci/\w+", text):
        assert os.access(ROOT / name, os.X_OK)
    for line in text.splitlines():
        assert not ("run:" in line and "${{" in line), "an expression in a command is code"
    assert "permissions:\n  contents: read\n" in text
