"""compute-sanitizer: its path, its command line and the names of its files."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from verify.cuda.toolkit import executables
from verify.machine.settings import COMPUTE_SANITIZER

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
POISONED = "memcheck"  # under which every case runs a second time, over other poison
SKEW = "skew"  # a tool of this suite: verify.sanitizers.skew
EVERY = (*TOOLS, SKEW)  # those of a run that names none
CONSAN = "consan"  # Triton's: verify.sanitizers.instrumented
FPSAN = "fpsan"  # Triton's: verify.sanitizers.algebra
INSTRUMENTING = (CONSAN, FPSAN)  # tools that Triton's compiler has; only tried if they are named
ALL = (*EVERY, *INSTRUMENTING)
ERROR_EXIT = 86  # the tool's exit code if it found errors in a program that ended with 0
PRINT_LIMIT = 200  # records printed for one process; the summary counts all
_PATIENCE = 600  # seconds until a program must use CUDA: importing torch can take long
_PORTS, _FIRST_PORT = 16, 49152  # port numbers for the sockets of each parallel tool


# Options that newer versions have, and what of them a planted fault has to prove.
SHARED_SPACE = "--initcheck-address-space"  # from CUDA 13.1 on
NEWER = frozenset({SHARED_SPACE})


@dataclass(frozen=True)
class Sanitizer:
    """The tool: the machine's own, or the one that VERIFY_COMPUTE_SANITIZER names."""

    executable: str
    version: str
    offers: frozenset[str] = frozenset()  # of NEWER

    def command(self, tool: str, folder: Path, lane: int) -> list[str]:
        """The command line to put before a program's.  lane: a number for each parallel tool."""
        arguments = [
            self.executable,
            "--tool",
            tool,
            "--xml",
            "--save",
            str(folder / XML),
            "--log-file",
            str(folder / LOG),
        ]
        arguments += [
            "--error-exitcode",
            str(ERROR_EXIT),
            "--print-limit",
            str(PRINT_LIMIT),
            "--show-backtrace",
            "device",
        ]
        # Only the root process launches kernels.  Processes that Triton or torch start (ldconfig, a
        # compiler) are not checked.
        arguments += [
            "--target-processes",
            "application-only",
            "--port",
            str(_FIRST_PORT + _PORTS * lane),
        ]
        arguments += ["--launch-timeout", str(_PATIENCE)]
        # A failing CUDA call raises in the child, or leaves poison in an output.  With this option
        # the tool would also report harmless failing calls.
        if tool == "initcheck" and SHARED_SPACE in self.offers:
            arguments += [SHARED_SPACE, "all"]
        return arguments + (["--report-api-errors", "no"] if tool == "memcheck" else [])


XML, LOG, OUTPUT, LEDGER = "records.xml", "tool.log", "child.log", "launches.jsonl"


def find() -> Sanitizer | None:
    """The compute-sanitizer that VERIFY_COMPUTE_SANITIZER names, or else this machine's (PATH, then
    CUDA_HOME, then /usr/local/cuda); None if that does not work, or there is none."""
    named = os.environ.get(COMPUTE_SANITIZER)
    found = [named] if named else executables("compute-sanitizer")
    if not found:
        return None
    version = re.search(r"Version ([\d.]+)", _said(found[0], "--version"))
    if version is None:
        return None
    options = set(re.findall(r"^ *(--[\w-]+)", _said(found[0], "--help"), re.MULTILINE))
    return Sanitizer(found[0], version[1], NEWER & options)


def _said(executable: str, option: str) -> str:
    """What the program prints; "" if it fails."""
    try:
        return subprocess.run(
            [executable, option], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
