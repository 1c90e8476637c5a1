"""What is known of a run's GPUs: how many control problems they had right, and which are
quarantined.

It is `gpus.json` in the run's directory, written by the first process of a session alone.  The
evidence of each worker names its GPU in its file's name, by a hash, so that all that a quarantined
one said can be taken out.
"""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

import msgspec

MARKER = (
    "gpu-is-quarantined"  # a file; no process of the session begins another case once it exists
)
_FILE, _OUT = "gpus.json", "quarantined"


class Gpu(msgspec.Struct, frozen=True):
    """controls: how often the control problem was right.  quarantined: why it is, or ""."""

    controls: int = 0
    quarantined: str = ""


def recorder_name(worker: str, gpu: str) -> str:
    """What the evidence of a worker on a GPU is called; gpu: its UUID, or ""."""
    return f"{worker}.{key_of(gpu)}" if gpu else worker


def key_of(gpu: str) -> str:
    """A GPU in the names of files, which say nothing of the machine."""
    return f"gpu-{sha256(gpu.encode()).hexdigest()[:12]}"


def read(run: Path) -> dict[str, Gpu]:
    """A run's GPUs by UUID; nothing if the run has had none."""
    path = run / _FILE
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Gpu]) if path.exists() else {}


def write(run: Path, gpus: dict[str, Gpu]) -> None:
    """Remember a run's GPUs.  Raises OSError if the disk refuses."""
    new = run / f"{_FILE}.new"
    new.write_bytes(msgspec.json.encode(gpus))
    os.replace(new, run / _FILE)


def quarantined(run: Path) -> dict[str, str]:
    """The quarantined GPUs of a run, and why they are."""
    return {name: gpu.quarantined for name, gpu in read(run).items() if gpu.quarantined}


def files_of(run: Path, gpu: str, *, out: bool = False) -> list[Path]:
    """The evidence that was recorded on a GPU.  out: what is taken out of the run."""
    folder = run / _OUT if out else run
    return sorted(folder.glob(f"*.{key_of(gpu)}*.jsonl"))


def take_out(run: Path) -> None:
    """Move the evidence of quarantined GPUs out of the run; it is kept, and counts for nothing."""
    for gpu in quarantined(run):
        for path in files_of(run, gpu):
            (run / _OUT).mkdir(exist_ok=True)
            number = len(list((run / _OUT).glob(f"{path.stem}*")))
            os.replace(path, run / _OUT / f"{path.stem}.{number}.jsonl")
