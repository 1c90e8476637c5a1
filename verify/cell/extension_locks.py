"""Batons: lock files of torch.utils.cpp_extension, which a killed process leaves behind.

torch's baton is a file that exists while somebody builds: it holds it open, and removes it at the
end.  A life that is killed in the middle of a build never does, and whoever loads that extension
next waits for ever.  A baton that no process holds open is nobody's.
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
_TWICE = 0.2  # seconds between two looks: who releases a baton closes it just before it is removed


def held_by(pid: int) -> set[Path]:
    """The batons that a process or its descendants hold."""
    return {path for each in (pid, *descendants(pid)) for path in _open_batons(each)}


def clear(suspects: Iterable[Path] = ()) -> None:
    """Remove the batons that nobody holds: of `suspects`, and where torch builds extensions by
    default."""
    found = {path for path in (*suspects, *_default()) if path.is_file()}
    if not found:
        return
    for _ in range(2):
        found -= {path for pid in _processes() for path in _open_batons(pid)}
        time.sleep(_TWICE if found else 0)
    for path in found:
        with contextlib.suppress(OSError):
            path.unlink()


def _default() -> list[Path]:
    """Batons under TORCH_EXTENSIONS_DIR, or where torch puts it."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or user_cache() / "torch_extensions")
    return [path for pattern in (f"*/{_NAME}", f"*/*/{_NAME}") for path in root.glob(pattern)]


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _open_batons(pid: int) -> set[Path]:
    found = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.endswith(f"/{_NAME}"):
                    found.add(Path(target))
    return found
