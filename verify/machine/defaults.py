"""Defaults: the table [tool.verify] of the pyproject.toml beside or above the current directory.

`verify run` and `verify.check` take them where nothing else is said.  Imports nothing heavy.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "pyproject.toml"
PROFILES = ("dev", "ci", "gpu", "nightly")


class DefaultsError(ValueError):
    """A table that makes no sense, in one line: the file, the key, and what it may hold."""


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What the table says; None: nothing.

    examples: random problems per dtype and group of oracles.  time: seconds after which no case
    begins.  workers: "auto" or a number.  kernels: files that `verify run` judges if none is given.
    """

    examples: int | None = None
    time: float | None = None
    profile: str | None = None
    seed: int | None = None
    workers: str | None = None
    strict: bool | None = None
    kernels: tuple[Path, ...] = ()


def defaults(folder: Path | None = None) -> Defaults:
    """The table that holds for a folder, by default the current one.  Raises DefaultsError."""
    here = (folder or Path()).resolve()
    file = next((each / FILE for each in (here, *here.parents) if (each / FILE).is_file()), None)
    if file is None:
        return Defaults()
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DefaultsError(f"{FILE}: {' '.join(str(error).split())}") from None
    table = tables.get("tool", {}).get("verify", {})
    if not isinstance(table, Mapping):
        raise DefaultsError(f"{FILE}: tool.verify: {table!r} is no table")
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key not in _RULES:
            raise DefaultsError(
                f"{FILE}: tool.verify.{key}: no such key; there are {', '.join(_RULES)}"
            )
        legal, kept = _RULES[key]
        try:
            found[key] = kept(value)
        except (TypeError, ValueError):
            raise DefaultsError(f"{FILE}: tool.verify.{key}: {value!r} is no {legal}") from None
    if "kernels" in found:
        found["kernels"] = tuple(_near(file.parent / name, here) for name in found["kernels"])
    return Defaults(**found)


def _near(path: Path, here: Path) -> Path:
    """A path as the current directory's, if it is below that: it is the name of a kernel."""
    return path.relative_to(here) if path.is_relative_to(here) else path


def _whole(least: int) -> Callable[[object], int]:
    def kept(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError
        return value

    return kept


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError
    if not (value > 0 and math.isfinite(value)):
        raise ValueError
    return float(value)


def _profile(value: object) -> str:
    if value not in PROFILES:
        raise ValueError
    return str(value)


def _workers(value: object) -> str:
    return "auto" if value == "auto" else str(_whole(0)(value))


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _files(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError
    return tuple(value)


# Key -> what is legal, in words, and the check.
_RULES: Mapping[str, tuple[str, Callable[[object], object]]] = {
    "examples": ("whole number from 1", _whole(1)),
    "time": ("number of seconds above 0", _seconds),
    "profile": (f"name out of {', '.join(PROFILES)}", _profile),
    "seed": ("whole number from 0", _whole(0)),
    "workers": ('"auto" or whole number from 0', _workers),
    "strict": ("true or false", _flag),
    "kernels": ("list of paths", _files),
}
