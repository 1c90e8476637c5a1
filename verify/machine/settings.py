"""Settings: the environment variables for users, and their legal values
(docs/reference/environment.md)."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


class SettingError(ValueError):
    """A variable has an illegal value; the message names it and the legal values in one line."""


LEGAL = {
    "positive": "a number of seconds above 0",
    "seconds": "a number of seconds of at least 0",
    "size": "a number of GiB above 0",
    "count": "a whole number of at least 0",
    "switch": "0 or 1",
    "directory": "the path of a directory (it is made if it is missing)",
    "directories": f"paths of directories, separated by {os.pathsep}",
    "files": f"paths of existing files, separated by {os.pathsep}",
    "program": "the path of a program that can be run",
    "triton": "the path of a folder that holds the package triton",
    "device": "auto, cpu or cuda",
}
"""What a variable may hold, by its kind."""


@dataclass(frozen=True)
class Setting:
    """One variable.

    kind: a key of LEGAL.  default, meaning: as docs/reference/environment.md says them, in
    Markdown; the default is empty where nothing is set.
    """

    name: str
    kind: Literal[
        "positive",
        "seconds",
        "size",
        "count",
        "switch",
        "directory",
        "directories",
        "files",
        "program",
        "triton",
        "device",
    ]
    default: str
    meaning: str


KIND_FILES = "VERIFY_WITH"
"""Files of masks, score mods, storages and quantisations; a process loads them at its start."""

JUDGE_DEVICE = "VERIFY_JUDGE_DEVICE"
"""Where the judge computes references and bounds."""

SIBLINGS = "VERIFY_SIBLINGS"
"""How many cases of the same shape are judged beside each drawn one."""

LARGEST = "VERIFY_LARGEST"
"""How many numbers a random problem may have."""

LAUNCHERS = "VERIFY_LAUNCHERS"
"""How many processes launch kernels on one GPU at the same time."""

BLOCKING_WAITS = "VERIFY_BLOCKING_WAITS"
"""Whether kernel processes and judges sleep while they wait for their GPU."""

COMPUTE_SANITIZER = "VERIFY_COMPUTE_SANITIZER"
"""The compute-sanitizer to use instead of the machine's own."""

TRITON = "VERIFY_TRITON"
"""The folder of another Triton than the installed one, for every process that runs kernels."""

SETTINGS = (
    Setting(
        "VERIFY_DEADLINE",
        "positive",
        "60 (CPU), 120 (GPU)",
        "The longest time of one launch of a kernel; a longer one is a hang.",
    ),
    Setting(
        "VERIFY_BUILD_DEADLINE",
        "positive",
        "900",
        "The longest time for loading or compiling a kernel file.",
    ),
    Setting(
        "VERIFY_LIFE_MEMORY",
        "size",
        "16, or half of the machine's memory",
        "The most memory that one request to a kernel may take.",
    ),
    Setting(
        "VERIFY_CONFINE",
        "switch",
        "1",
        "0: kernels are not confined ([security.md](../security.md)); for debuggers and profilers.",
    ),
    Setting(
        "VERIFY_WRITABLE",
        "directories",
        "",
        "More directories that kernels may write to, for their caches.",
    ),
    Setting(
        "VERIFY_SEARCH_SECONDS",
        "seconds",
        "15",
        "The longest time of the search for one target (variant, config, dtype, group).",
    ),
    Setting(
        "VERIFY_SHRINK_SECONDS",
        "seconds",
        "15; 3 with `-x`",
        "The longest time of a failing target's search for a smaller case.",
    ),
    Setting(
        "VERIFY_CUDA_CACHE",
        "directory",
        "attention-verify/cuda in the user's cache",
        "The directory of compiled CUDA kernels.",
    ),
    Setting(
        "VERIFY_BOOTSTRAP",
        "switch",
        "1",
        "0: `python -m verify` sets up no environment if packages are missing.",
    ),
    Setting(
        JUDGE_DEVICE,
        "device",
        "auto",
        "Where references and bounds are computed: `auto`, large ones on the first visible GPU and"
        " others on the CPU; `cpu`; `cuda`, all on that GPU. Without a GPU, or where its memory is"
        " full, the CPU computes them.",
    ),
    Setting(
        SIBLINGS,
        "count",
        "0",
        "How many cases of the same shape, with other values, are judged beside each drawn problem"
        " of random accuracy and gradients; they share messages to the kernel process, and their"
        " references and bounds are computed together"
        " ([performance.md](../performance.md#many-cases-at-once)).",
    ),
    Setting(
        LARGEST,
        "count",
        "0",
        "The most pairs of a query and a key that a random problem has, and the most elements of"
        " Q, K, V and O together unless a single head has more; lengths are a 32nd of it at most."
        " 0: what is usual for the device. Small problems are judged several times as fast"
        " ([performance.md](../performance.md#a-campaign-of-small-problems)).",
    ),
    Setting(
        LAUNCHERS,
        "count",
        "0",
        "How many processes launch kernels on one GPU at the same time; the others wait for their"
        " turn. 0: all of them ([performance.md](../performance.md#many-processes-on-one-gpu)).",
    ),
    Setting(
        BLOCKING_WAITS,
        "switch",
        "0",
        "1: kernel processes and judges sleep while they wait for their GPU, and leave their cores"
        " to others.",
    ),
    Setting(
        KIND_FILES,
        "files",
        "",
        "Files of masks, score mods, storages and quantisations, as `--with` names them, for"
        " commands without the option and for pytest.",
    ),
    Setting(
        COMPUTE_SANITIZER,
        "program",
        "the machine's",
        "The compute-sanitizer of `verify sanitize`, such as a newer one"
        " ([sanitizers.md](../sanitizers.md)).",
    ),
    Setting(
        TRITON,
        "triton",
        "the installed one",
        "The Triton of every process that runs kernels, such as a newer one"
        " ([sanitizers.md](../sanitizers.md#another-triton)).",
    ),
)

OTHERS = {
    "OMP_NUM_THREADS": "Limits the threads of each process.",
    "CI": "Makes `ci` the default profile on a machine without a GPU, if it is set.",
}
"""Variables of other programs that the suite reads."""

# Variables that the suite's processes set for each other; users do not set them.
WORKSPACES = "VERIFY_SANITIZER_WORKSPACES"  # of a program under a tool: "poisoned" or "unwritten"
STARTER = "VERIFY_STARTER"  # of a starter's fork that asks it for more, see `starter.adopt`
INTERNAL = (
    STARTER,
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
            legal = value in ("0", "1")
        case "directories":
            legal = all(
                not Path(entry).exists() or Path(entry).is_dir()
                for entry in value.split(os.pathsep)
            )
        case "files":
            legal = all(Path(entry).is_file() for entry in value.split(os.pathsep) if entry)
        case "count":
            legal = value.isascii() and value.isdigit()
        case "device":
            legal = value in ("auto", "cpu", "cuda")
        case "program":
            legal = Path(value).is_file() and os.access(value, os.X_OK)
        case "triton":
            legal = (Path(value) / "triton" / "__init__.py").is_file()
        case "directory":
            there = Path(value).exists() and not Path(value).is_dir()
            legal = bool(value.strip()) and not there
        case kind:
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            enough = number >= 0 if kind == "seconds" else number > 0
            legal = enough and math.isfinite(number)
    return None if legal else LEGAL[setting.kind]
