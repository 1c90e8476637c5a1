"""Settings: the environment variables for users, and their legal values (docs/command-line.md)."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


class SettingError(ValueError):
    """A variable has an illegal value; the message names it and the legal values in one line."""


@dataclass(frozen=True)
class Setting:
    """One variable.

    kind: "positive" (seconds above 0), "seconds" (from 0), "size" (GiB above 0), "switch" (0 or 1),
    "directory", "directories" (several), "files" (several), or "program" (a file that can be run).
    """

    name: str
    kind: Literal[
        "positive", "seconds", "size", "switch", "directory", "directories", "files", "program"
    ]


KIND_FILES = "VERIFY_WITH"
"""Files of masks, score mods, storages and quantisations; a process loads them at its start."""

COMPUTE_SANITIZER = "VERIFY_COMPUTE_SANITIZER"
"""The compute-sanitizer to use instead of the machine's own."""

SETTINGS = (
    Setting("VERIFY_DEADLINE", "positive"),
    Setting("VERIFY_BUILD_DEADLINE", "positive"),
    Setting("VERIFY_LIFE_MEMORY", "size"),
    Setting("VERIFY_CONFINE", "switch"),
    Setting("VERIFY_WRITABLE", "directories"),
    Setting("VERIFY_SEARCH_SECONDS", "seconds"),
    Setting("VERIFY_SHRINK_SECONDS", "seconds"),
    Setting("VERIFY_CUDA_CACHE", "directory"),
    Setting("VERIFY_BOOTSTRAP", "switch"),
    Setting(KIND_FILES, "files"),
    Setting(COMPUTE_SANITIZER, "program"),
)

# Variables that the suite's processes set for each other; users do not set them.
WORKSPACES = "VERIFY_SANITIZER_WORKSPACES"  # of a program under a tool: "poisoned" or "unwritten"
INTERNAL = (
    "VERIFY_UNTIL",
    "VERIFY_PARENT",
    "VERIFY_XFAILS_TEXT",
    "VERIFY_BOOTSTRAPPED",
    "VERIFY_LEASED_FILES",
    "VERIFY_SANITIZER_LEDGER",
    WORKSPACES,
)


def check() -> None:
    """Raise SettingError for the first variable with an illegal value."""
    for setting in SETTINGS:
        value = os.environ.get(setting.name)
        legal = None if value is None else _wants(setting, value)
        if legal is not None:
            raise SettingError(f"{setting.name}={value!r}: must be {legal}")


def seconds(name: str, default: float) -> float:
    """The value of a variable of SETTINGS, in seconds, or the default if it is not set."""
    return float(os.environ.get(name, default))


def _wants(setting: Setting, value: str) -> str | None:
    """The legal values as text, if the value is not one of them; else None."""
    match setting.kind:
        case "switch":
            return None if value in ("0", "1") else "0 or 1"
        case "directories":
            folders = all(
                not Path(entry).exists() or Path(entry).is_dir()
                for entry in value.split(os.pathsep)
            )
            return None if folders else f"paths of directories, separated by {os.pathsep}"
        case "files":
            files = all(Path(entry).is_file() for entry in value.split(os.pathsep) if entry)
            return None if files else f"paths of existing files, separated by {os.pathsep}"
        case "program":
            runs = Path(value).is_file() and os.access(value, os.X_OK)
            return None if runs else "the path of a program that can be run"
        case "directory":
            usable = value.strip() and not (Path(value).exists() and not Path(value).is_dir())
            return None if usable else "the path of a directory (it is made if it is missing)"
        case kind:
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            enough = number >= 0 if kind == "seconds" else number > 0
            more = "of at least 0" if kind == "seconds" else "above 0"
            unit = "GiB" if kind == "size" else "seconds"
            return None if enough and math.isfinite(number) else f"a number of {unit} {more}"
