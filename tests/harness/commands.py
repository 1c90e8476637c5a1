"""Commands as a user gives them, in a process and a directory of their own."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from verify.bundle import ROOT
from verify.machine.cores import of_its_pytest
from verify.machine.starter import JUDGES, Program, launch

_TIMEOUT = 600  # seconds


def verify(
    *words: object, cwd: Path, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -m verify` and return its exit code and all output.

    The suite's starter forks it, if there is one: it has imported all that a campaign needs.
    """
    own = {name: value for name, value in os.environ.items() if not of_its_pytest(name)}
    with tempfile.TemporaryFile("w+") as output:
        arguments = [str(word) for word in words]
        process = launch(
            JUDGES,
            Program(
                module="verify.__main__",
                arguments=arguments,
                environment={**own, "PYTHONPATH": str(ROOT), **(variables or {})},
                output=output.fileno(),
                directory=str(cwd),
                leashed=True,
            ),
        )
        status = process.wait(_TIMEOUT)
        output.seek(0)
        return subprocess.CompletedProcess(arguments, status, output.read())
