"""A continued run: the same kernels, no case judged twice, no case lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.harness.fake_campaign import DEVICE, evidence, verdict
from verify import cli
from verify.campaign.conclusion import campaign_fails
from verify.campaign.run import CampaignRun, ContinuedError
from verify.campaign.runner import INFRASTRUCTURE
from verify.cell.process import ROOT
from verify.evidence import Recorder
from verify.machine import device
from verify.problem import Problem
from verify.problem.case import Case

KERNEL = '''
"""A plain kernel."""
import torch


def attention(q, k, v):
    return torch.softmax((q @ k.mT) * q.shape[-1] ** -0.5, dim=-1) @ v
'''


def begun(folder: Path, kernel: Path) -> CampaignRun:
    run = CampaignRun(folder, "dev", (kernel,))
    assert len(run.roster.declarations) == 1
    return run


def test_what_was_lost_is_asked_first_when_a_run_goes_on(tmp_path: Path) -> None:
    kernel = tmp_path / "plain.py"
    kernel.write_text(KERNEL)
    first = begun(tmp_path / "run", kernel)
    (declared,) = first.roster.declarations
    problem = Problem(seqlen_q=2, seqlen_kv=3, head_dim=32, dtype=declared.support.dtypes[0])
    case = Case(declared.ref, declared.configs[0].name, "accuracy", problem)
    with Recorder(first.directory, "gw0") as recorder:
        recorder.begin(case.id, "generate", declared.ref)
    assert first.witnesses() == []
    again = CampaignRun(first.directory, "dev", (kernel,))
    again.resume()
    assert [id_ for _, id_ in again.witnesses()] == [case.id]


EXPECTED = """
[[xfail]]
cases = "torch-flash:.*"
link = "somewhere"
expires = 2100-01-01
witness = "torch-flash:-:campaign:float16.out"
"""


@pytest.mark.parametrize(
    ("known", "whole"),
    [("", True), (EXPECTED, False), (EXPECTED.replace("torch-", "other-"), True)],
)
def test_a_campaign_is_not_convicted_by_known_defects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str, whole: bool
) -> None:
    """Known failures can also expect verdicts on the campaign's statistics."""
    (tmp_path / "xfails.toml").write_text(known)
    monkeypatch.chdir(tmp_path)
    case = "torch-flash:-:campaign:float16.out"
    failed = verdict(
        "torch-flash",
        "float16",
        0,
        outcome="fail",
        group="campaign",
        oracle="statistics",
        case=case,
    )
    run = CampaignRun(tmp_path / "run", "dev", ())
    assert not campaign_fails(run)
    with Recorder(run.directory, "campaign") as recorder:
        recorder.write(evidence().runs[0])
        assert not campaign_fails(run)
        recorder.write(failed)
    assert campaign_fails(run) is whole


def test_a_run_does_not_go_on_with_another_source(tmp_path: Path) -> None:
    kernel = tmp_path / "plain.py"
    kernel.write_text(KERNEL)
    fresh = CampaignRun(tmp_path / "run", "dev", (kernel,))
    fresh.resume()  # nothing has begun: nothing to refuse
    assert len(fresh.roster.declarations) == 1
    CampaignRun(fresh.directory, "dev", (kernel,)).resume()
    kernel.write_text(KERNEL.replace("-0.5", "-0.4"))
    with pytest.raises(ContinuedError, match=r"run run judged other sources of .*plain"):
        CampaignRun(fresh.directory, "dev", (kernel,)).resume()


def test_a_run_does_not_go_on_on_another_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = tmp_path / "plain.py"
    kernel.write_text(KERNEL)
    run = begun(tmp_path / "run", kernel)
    CampaignRun(run.directory, "dev", (kernel,)).resume()
    other = device.fingerprint() | {"name": "NVIDIA H200", "slug": "nvidia-h200"}
    monkeypatch.setattr(device, "fingerprint", lambda: other)
    with pytest.raises(ContinuedError, match=r"another device, .*; this is NVIDIA H200"):
        CampaignRun(run.directory, "dev", (kernel,)).resume()


def test_a_run_does_not_go_on_with_a_file_that_no_longer_loads(tmp_path: Path) -> None:
    kernel = tmp_path / "plain.py"
    kernel.write_text(KERNEL)
    run = begun(tmp_path / "run", kernel)
    kernel.write_text("import no_such_module")
    with pytest.raises(ContinuedError, match=r"run run judged other sources of .*plain"):
        CampaignRun(run.directory, "dev", (kernel,)).resume()


def test_a_report_of_a_run_lies_where_its_device_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evidence of another machine goes to the folder of the measured device."""
    recorded = evidence(cases=8)
    monkeypatch.chdir(tmp_path)
    with Recorder(tmp_path / ".verify" / "runs" / "abroad", "gw0") as recorder:
        for record in (*recorded.runs, *recorded.variants, *recorded.verdicts):
            recorder.write(record)
    done = CliRunner().invoke(
        cli.app, ["report", "--run", "abroad", "--out", "pages"], standalone_mode=False
    )
    assert done.exception is None, done.output
    assert [path.name for path in (tmp_path / "pages").iterdir()] == [DEVICE["slug"]]
    assert (tmp_path / "pages" / DEVICE["slug"] / "report.html").is_file()


def descendants(pid: int) -> set[int]:
    """A process's children, and theirs."""
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return set()
    return {int(word) for word in words}.union(*(descendants(int(word)) for word in words))


def test_a_run_that_is_terminated_ends_its_workers(tmp_path: Path) -> None:
    """`timeout` sends SIGTERM only to `verify run`; its pytest is in another session."""
    kernel = tmp_path / "plain.py"
    kernel.write_text(KERNEL)
    command = [sys.executable, "-m", "verify", "run", "-n", "0", str(kernel)]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not list(tmp_path.glob(".verify/runs/*/roster.json")) and time.monotonic() < until:
            time.sleep(0.1)
        begun = descendants(run.pid)
        assert len(begun) > 1
        run.terminate()
        assert run.wait(30) == INFRASTRUCTURE
        until = time.monotonic() + 10
        while (left := [each for each in begun if Path(f"/proc/{each}").exists()]) and (
            time.monotonic() < until
        ):
            time.sleep(0.1)
        assert not left
    finally:
        run.kill()
