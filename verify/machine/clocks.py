"""The clocks of the first visible GPU, by nvidia-smi: read, and locked for a while."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict

from verify.machine import device

_QUERY = "clocks.sm,clocks.mem,power.draw,temperature.gpu"


class Reading(TypedDict):
    """What nvidia-smi says at one moment; None where it says nothing."""

    sm_mhz: float | None
    memory_mhz: float | None
    watts: float | None
    celsius: float | None


class ClockError(RuntimeError):
    """nvidia-smi did not lock the clocks; the message is its own."""


def reading() -> Reading:
    """The clocks, power and temperature now."""
    uuid = device.uuid()
    said = _smi(f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits") if uuid else None
    words = said.stdout.strip().split(",") if said is not None and not said.returncode else []
    numbers = [*map(_number, words), None, None, None, None]
    return {
        "sm_mhz": numbers[0],
        "memory_mhz": numbers[1],
        "watts": numbers[2],
        "celsius": numbers[3],
    }


@contextmanager
def locked(mhz: int | None) -> Iterator[None]:
    """The SM clock locked to `mhz` while the context is open, and released after it; None: left
    alone.  Raises ClockError if nvidia-smi refuses, which it does without the right to."""
    if mhz is None:
        yield
        return
    done = _smi(f"--lock-gpu-clocks={mhz},{mhz}") if device.uuid() else None
    if done is None or done.returncode:
        said = "there is no GPU" if done is None else (done.stdout + done.stderr).strip()
        raise ClockError(said.splitlines()[-1] if said else "nvidia-smi refused")
    try:
        yield
    finally:
        _smi("--reset-gpu-clocks")


def _smi(*words: str) -> subprocess.CompletedProcess[str] | None:
    """nvidia-smi on the first visible GPU; None if it cannot be run."""
    command = ("nvidia-smi", f"--id={device.uuid()}", *words)
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return None


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
