"""Judged cases a second, and where their time goes, with the judge on the device that
VERIFY_JUDGE_DEVICE names: `python -m tests.harness.judging_rate SECONDS SELECT DIRECTORY`.

SELECT is an expression of pytest -k; torch's kernels need no compiler.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from rich.console import Console

from verify.campaign.runner import RunRequest, evidence_of, execute
from verify.cell.discovery import environment
from verify.cli.bench_suite import breakdown
from verify.machine.settings import JUDGE_DEVICE


def main(seconds: float, select: str, directory: Path) -> None:
    profile = "gpu" if environment().device == "cuda" else "dev"
    request = RunRequest(profile=profile, select=select, quiet=True, report_dir=directory)
    execute(request, Console(width=160), time.monotonic() + seconds)
    evidence = evidence_of(request)
    assert evidence is not None
    verdicts = evidence.verdicts
    failed = sorted({v.case for v in verdicts if v.finding is not None})
    print(f"judge on: {os.environ.get(JUDGE_DEVICE, 'auto')}; failing cases: {len(failed)}")
    for case in failed[:5]:
        print(f"  {case}")
    Console(width=160).print(breakdown(evidence))


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
