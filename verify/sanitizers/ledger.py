"""The ledger: which kernels a sanitized process launched, and from where.

A tool does not say which kernels it has watched, and a profiler cannot run beside it.  So the
process writes a line before each run, and a line at each launch that goes through
`verify.cuda.compile.launch` (CUDA C++) or Triton's launcher.  The lines are in the file even if the
process dies afterwards.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from verify.bundle import ROOT

VARIABLE = "VERIFY_SANITIZER_LEDGER"  # the file's path, in the process's environment
# Families whose every launch is in the ledger.
FAMILIES = frozenset({"cute", "gluon", "planted", "ptx", "triton"})


@dataclass(frozen=True)
class Launched:
    """One launch.  frame: the innermost Python frame outside the judge, torch and Triton, as
    "file:line in function"."""

    kernel: str
    frame: str


Ledger = tuple[tuple[Launched, ...], ...]
"""The launches of each run of an entry point, in order."""


def begin_run() -> None:
    """Write that a run begins.  Called in the sanitized process, as is `watch`."""
    _write({"run": True})


def write_binary(kernel: str, shared: int, *, changed: bool, floats: bool = False) -> None:
    """Write what Triton has built: see `verify.sanitizers.binaries`, which reads it."""
    _write({"binary": kernel, "shared": shared, "changed": changed, "floats": floats})


def watch() -> None:
    """Write every launch from now on.  Call it before kernel files are loaded."""
    from verify.cuda import compile as cuda

    launch: Callable[..., None] = cuda.launch

    def recorded(kernel: Any, *rest: Any) -> None:
        _write({"kernel": kernel.entry, "frame": _frame()})
        launch(kernel, *rest)

    cuda.launch = recorded  # type: ignore[assignment]
    try:
        from triton import knobs
    except ImportError:
        return
    knobs.runtime.launch_enter_hook.add(
        lambda metadata: _write({"kernel": metadata.get()["name"], "frame": _frame()})
    )


def _write(line: dict[str, Any]) -> None:
    with open(os.environ[VARIABLE], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _frame() -> str:
    others = [str(ROOT / "verify"), str(Path(torch.__file__).parent), "<"]
    if triton := sys.modules.get("triton"):
        others.append(str(Path(str(triton.__file__)).parent))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(tuple(others)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else ""


def read(path: Path) -> Ledger | None:
    """The ledger that a process left; None if there is none that can be read."""
    runs: list[list[Launched]] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            said = json.loads(line)
            if "run" in said:
                runs.append([])
            elif "binary" not in said:
                runs[-1].append(Launched(said["kernel"], said["frame"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return tuple(tuple(run) for run in runs)


def frame_of(words: str, ledger: Ledger | None) -> str:
    """The Python frame of the launch that a record is about: the last one of a kernel that its
    words name, or else the process's last one, at which a process ends that has made an error."""
    launches = [launched for run in ledger or () for launched in run]
    named = [launched for launched in launches if launched.kernel in words] or launches
    return named[-1].frame if named else ""
