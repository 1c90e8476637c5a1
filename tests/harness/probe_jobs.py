"""Jobs for a probe's process in tests; this module imports nothing heavy, since every failure costs
a new process."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Said:
    word: str
    process: int
    error: str = ""


def says(word: str, error: str = "") -> Said:
    return Said(word, os.getpid(), error)


def raises() -> Said:
    raise ValueError("planted")


def dies() -> Said:
    os._exit(7)


def hangs() -> Said:
    time.sleep(600)
    raise AssertionError
