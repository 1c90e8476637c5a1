"""Errors: what failed in a run that is no verdict on a kernel, by the variant that was on trial.

One JSON object per line of `<run>/errors.log`, written by the process that hears from all workers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

_FILE = "errors.log"
_MOST = 300  # characters of a message


@dataclass(frozen=True)
class JudgeError:
    """variant: a ref, or "" where none is known; test: which test failed; message: one line that
    says why."""

    variant: str
    test: str
    message: str


def begin(directory: Path) -> None:
    """Forget the errors of an earlier process of that run: what it could not judge is asked
    again."""
    (directory / _FILE).unlink(missing_ok=True)


def record(directory: Path, error: JudgeError) -> None:
    """Append one error.  Raises OSError if the disk refuses."""
    line = json.dumps(asdict(error)).encode() + b"\n"
    descriptor = os.open(directory / _FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def read(directory: Path) -> tuple[JudgeError, ...]:
    """The errors of a run in the order in which they came, each once; a line cut short is left
    out."""
    path = directory / _FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found = []
    for line in lines:
        try:
            found.append(JudgeError(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return tuple(dict.fromkeys(found))


def shortened(text: str) -> str:
    """The last line of a trace or a message, which names the error, cut to a readable length."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    said = lines[-1] if lines else "no message"
    return said if len(said) <= _MOST else said[: _MOST - 3] + "..."


def variant_in(test: str, refs: Iterable[str]) -> str:
    """The variant whose ref a test's id holds, the longest if several do; "" if none does."""
    _, _, parameters = test.partition("[")
    return max((ref for ref in refs if ref in parameters), key=len, default="")
