"""ncu: its path, its command lines and the text of its report."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verify.cuda.toolkit import executables

REPORT = "profile.ncu-rep"
_READING = 300.0  # seconds to print a report


class ProfileError(RuntimeError):
    """ncu did not profile; the message says what it did instead."""


@dataclass(frozen=True)
class Profiler:
    """The installed ncu."""

    executable: str
    version: str

    def command(self, folder: Path, metrics: Sequence[str], *, full: bool) -> list[str]:
        """The command line to put before a program's; its report is REPORT in `folder`.

        The program says itself, through the CUDA profiler API, which of its launches count.
        full: all sections, beside the metrics.
        """
        what = ["--set", "full"] if full else []
        return [
            *(self.executable, *what, "--metrics", ",".join(metrics)),
            *("--profile-from-start", "off"),
            *("--clock-control", "none"),  # a shared machine's clocks stay as they are
            *("--target-processes", "application-only"),
            *("--force-overwrite", "--export", str(folder / REPORT)),
        ]

    def rows(self, folder: Path) -> str:
        """The report as CSV: names of metrics, their units, and a row for each launch.

        Raises ProfileError if there is none, or if ncu cannot read it.
        """
        path = folder / REPORT
        if not path.is_file():
            raise ProfileError("ncu wrote no report: it profiled no kernel")
        command = [self.executable, "--import", str(path), "--csv", "--page", "raw"]
        try:
            result = subprocess.run(
                [*command, "--print-units", "base"],
                check=False,
                capture_output=True,
                text=True,
                timeout=_READING,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise ProfileError(f"ncu cannot print its report: {error}") from None
        if result.returncode != 0:
            words = (result.stderr or result.stdout).strip()[-500:]
            raise ProfileError(f"ncu cannot print its report: {words}")
        return result.stdout


def find() -> Profiler | None:
    """The ncu of this machine, or None if there is none that works."""
    for executable in executables("ncu"):
        try:
            output = subprocess.run(
                [executable, "--version"], capture_output=True, text=True, timeout=60, check=True
            ).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        if version := re.search(r"Version ([\d.]+)", output):
            return Profiler(executable, version[1])
    return None
