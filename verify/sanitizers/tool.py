"""compute-sanitizer itself: where it is, what it is asked, and what it leaves."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("memcheck", "racecheck")
ERROR_EXIT = 86  # what the tool ends with if it found errors in a program that itself ended with 0
PRINT_LIMIT = 200  # records kept of one process; the summary counts the rest
# seconds until a program must have begun with CUDA; importing torch on a busy machine takes its
# time
_PATIENCE = 600
# the tool's socket names carry port numbers: its own range for each of several at once
_PORTS, _FIRST_PORT = 16, 49152


@dataclass(frozen=True)
class Sanitizer:
    """The installed tool."""

    executable: str
    version: str

    def command(self, tool: str, folder: Path, lane: int) -> list[str]:
        """The words before a program's own.  `lane` numbers the tools that run at the same time."""
        words = [
            self.executable,
            "--tool",
            tool,
            "--xml",
            "--save",
            str(folder / XML),
            "--log-file",
            str(folder / LOG),
        ]
        words += [
            "--error-exitcode",
            str(ERROR_EXIT),
            "--print-limit",
            str(PRINT_LIMIT),
            "--show-backtrace",
            "device",
        ]
        # The root process alone launches kernels; what Triton or torch may start beside it
        # (ldconfig, a compiler) is not tried.
        words += [
            "--target-processes",
            "application-only",
            "--port",
            str(_FIRST_PORT + _PORTS * lane),
        ]
        words += ["--launch-timeout", str(_PATIENCE)]
        # A failing CUDA call raises in the child, or leaves poison in an output; the tool would
        # also report harmless probing.
        return words + (["--report-api-errors", "no"] if tool == "memcheck" else [])


XML, LOG, WORDS = "records.xml", "tool.log", "child.log"


def find() -> Sanitizer | None:
    """The compute-sanitizer of this machine (PATH, then CUDA_HOME, then /usr/local/cuda), or None
    if none answers."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = os.pathsep.join(
        [os.environ.get("PATH", ""), *(str(Path(home) / "bin") for home in homes if home)]
    )
    executable = shutil.which("compute-sanitizer", path=places)
    if executable is None:
        return None
    try:
        said = subprocess.run(
            [executable, "--version"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"Version ([\d.]+)", said)
    return Sanitizer(executable, version[1]) if version else None
