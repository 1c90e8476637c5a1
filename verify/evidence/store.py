"""Evidence: what a run records on disk, safe under many writer processes and under a kill at any
moment.

A run is a directory `<root>/<run_id>/` with one append-only file per writer process,
`<worker>.jsonl`, one JSON object per line.  Each record is one `os.write` to a descriptor opened
with O_APPEND: when `Recorder.write` returns, the kernel has the whole line, so a killed writer
loses at most the line that it was writing.  Power loss is not covered (no fsync per record).

`load` reads directories back, tolerates torn lines and counts them, and joins what several writers
said of one case.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from verify.evidence import strict_json
from verify.evidence.records import (
    KINDS,
    Begin,
    EvidenceError,
    Interruption,
    Passed,
    Phase,
    Record,
    Told,
    Verdict,
)

_KIND_OF = {record: kind for kind, record in KINDS.items()}


def new_run_id(now: datetime | None = None) -> str:
    """A directory name that sorts by time and collides with none: 20250131T235959Z-1a2b3c."""
    return f"{(now or datetime.now(UTC)).astimezone(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def is_plain(name: str) -> bool:
    """Whether a run or a worker may be called so: a file name, without a path."""
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) is not None


class Recorder:
    """Appends records to `<run_dir>/<worker>.jsonl`; opening an existing file continues it.

    Raises EvidenceError for a worker name that is no plain file name, OSError if the disk refuses.
    """

    def __init__(self, run_dir: Path | str, worker: str = "main") -> None:
        if not is_plain(worker):
            raise EvidenceError(f"worker: {worker!r} is not a plain file name")
        self.path = Path(run_dir) / f"{worker}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd: int | None = os.open(
            self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
        )
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # see `being_written`
        # a predecessor died in the middle of a line: do not continue it
        if not _ends_with_newline(self.path):
            os.write(self._fd, b"\n")

    def write(self, record: Record) -> None:
        """Append one record, stamping a verdict or an interruption that has no time."""
        if self._fd is None:
            raise EvidenceError(f"{self.path}: is closed")
        if isinstance(record, Verdict | Passed | Interruption) and record.time == 0.0:
            record = replace(record, time=time.time())
        values = _values(record)
        if isinstance(record, Passed):  # most lines are such: they hold nothing that is empty
            told = [_filled(_values(each)) for each in record.told]
            values = _filled(values | {"told": told})
        line = strict_json.line({"kind": _KIND_OF[type(record)], **values})
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        written = os.write(self._fd, data)
        if written != len(data):
            os.write(self._fd, b"\n")
            raise OSError(f"{self.path}: {written} of {len(data)} bytes written; is the disk full?")

    def write_case(self, verdicts: Sequence[Verdict]) -> None:
        """Append what the oracles say of one case: one line where none convicts."""
        passed = Passed.of(verdicts)
        for record in verdicts if passed is None else (passed,):
            self.write(record)

    def begin(self, case: str, phase: Phase, variant: str = "", ahead: int = 0) -> None:
        """Say that `case` is about to be launched; call it before the launch.  ahead: see
        `Begin`."""
        begun = Begin(case=case, phase=phase, time=time.time(), variant=variant, ahead=ahead)
        self.write(begun)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def being_written(path: Path) -> bool:
    """Whether a process that lives has the file open in a `Recorder`.  False where the file system
    has no locks."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False


def _values(record: Record | Told) -> dict[str, object]:
    return {name: getattr(record, name) for name in strict_json.names(type(record))}


def _filled(values: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value}


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
