"""profiles.json as typed data: what `verify profile` measured on one device, of any number of
kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Final, TypedDict

from verify.evidence.strict_json import Free, Integer, Number, decode, dumps, loads
from verify.profiling.metrics import KernelProfile

SCHEMA_VERSION: Final = 1
NAME: Final = "profiles.json"


class ProfiledKernel(TypedDict):
    """One kernel of a profiled launch; the fields are those of `KernelProfile`."""

    name: str
    grid: str
    block: str
    values: dict[str, Number | None]
    stalls: dict[str, Number]
    limits: dict[str, Number]


class Profile(TypedDict):
    """One launch under ncu.

    problem: its name.  ncu: the tool's version.  kernels: what the launch started, in order.
    """

    variant: str
    source_hash: str
    config: str
    problem: str
    ncu: str
    kernels: list[ProfiledKernel]


class Profiles(TypedDict):
    """All launches that were profiled on a device."""

    schema: Integer
    device: dict[str, Free]
    profiles: list[Profile]


def kernels_of(measured: list[KernelProfile]) -> list[ProfiledKernel]:
    """The same as data."""
    return [
        {
            "name": kernel.name,
            "grid": kernel.grid,
            "block": kernel.block,
            "values": kernel.values,
            "stalls": kernel.stalls,
            "limits": kernel.limits,
        }
        for kernel in measured
    ]


def read(path: Path) -> Profiles:
    """Raises OSError, and ValueError for a file that holds something else."""
    return decode(Profiles, loads(path.read_text(encoding="utf-8")), "profiles")


def keep(folder: Path, new: Profiles) -> Path:
    """Write profiles into the file of a folder; the last one of a variant, config and problem
    stays.  What the file holds of another device, or does not read as profiles, goes.

    Returns its path.
    """
    path = folder / NAME
    try:
        old = read(path)
    except (OSError, ValueError):
        old = new
    same = old["device"].get("slug") == new["device"].get("slug")
    whole = {_key(one): one for one in (*(old["profiles"] if same else ()), *new["profiles"])}
    folder.mkdir(parents=True, exist_ok=True)
    record: Profiles = {**new, "profiles": [whole[key] for key in sorted(whole)]}
    path.write_text(dumps(record, depth=4) + "\n", encoding="utf-8")
    return path


def _key(one: Profile) -> tuple[str, str, str]:
    return one["variant"], one["config"], one["problem"]
