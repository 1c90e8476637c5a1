"""A child process in which Triton is in interpreter mode, with its repairs."""

import os
import subprocess
import sys

from verify.bundle import ROOT


def in_child(*arguments: str, interpret: str = "1") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": interpret, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
