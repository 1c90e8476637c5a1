"""Batons: lock files of torch.utils.cpp_extension, which a killed process leaves behind.

torch's baton is a file that exists during a build.  The building process holds it open and removes
it at the end.  A kernel process that is killed during a build never removes it, and the next
process that loads the extension waits for ever.  A baton that no process holds open is stale.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from verify.cell.confinement import user_cache
from verify.cell.descendants import descendants

_NAME = "lock"
_RECHECK = 0.2  # seconds between two checks: a process closes its baton just before removing it


def held_by(pid: int) -> set[Path]:
    """The batons that a process and its descendants hold open."""
    return {path for each in (pid, *descendants(pid)) for path in _open_batons(each)}


def clear(suspects: Iterable[Path] = ()) -> None:
    """Remove the batons that no process holds open, among `suspects` and in torch's default build
    directory."""
    unheld = {path for path in (*suspects, *_default()) if path.is_file()}
    if not unheld:
        return
    for _ in range(2):
        unheld -= {path for pid in _processes() for path in _open_batons(pid)}
        time.sleep(_RECHECK if unheld else 0)
    for path in unheld:
        with contextlib.suppress(OSError):
            path.unlink()


def _default() -> list[Path]:
    """Batons under TORCH_EXTENSIONS_DIR, or in torch's default directory."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or user_cache() / "torch_extensions")
    return [path for pattern in (f"*/{_NAME}", f"*/*/{_NAME}") for path in root.glob(pattern)]


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _open_batons(pid: int) -> set[Path]:
    batons = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.endswith(f"/{_NAME}"):
                    batons.add(Path(target))
    return batons
