"""Campaigns that only seem to have run, for the tests of commands."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from tests.harness.fake_campaign import evidence, verdict
from verify import cli
from verify.campaign.runner import RunRequest
from verify.cell.process import ROOT
from verify.evidence import Evidence, Recorder
from verify.machine import starter
from verify.machine.starter import Program

SAMPLES = ROOT / "tests" / "sample_kernels"
PLAIN = str(SAMPLES / "correct_plain.py")


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["verify", *words])
    return cli.main()


# A campaign that ended: what is shown, and the exit code.


def recorded(run_id: str, data: Evidence) -> RunRequest:
    order = RunRequest(run_id=run_id)
    with Recorder(order.directory, "gw0") as recorder:
        for record in (*data.runs, *data.variants, *data.verdicts, *data.not_run, *data.drawn):
            recorder.write(record)
    return order


def passing() -> Evidence:
    """One variant, two dtypes, nothing failing."""
    data = evidence(cases=6)
    good = replace(data.variants[0], unavailable=None)
    verdicts = [verdict(good.ref, dtype, n) for dtype in ("float16", "bfloat16") for n in range(3)]
    verdicts = [v for v in verdicts if v.outcome == "pass"]
    return Evidence(runs=data.runs, variants=(good,), verdicts=tuple(verdicts))


def the_campaign_is(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """From now on this command runs instead of a campaign's process."""

    def launch(name: str, program: Program) -> subprocess.Popen[bytes]:
        return subprocess.Popen(words, stdout=program.output, start_new_session=True)

    monkeypatch.setattr(starter, "launch", launch)
