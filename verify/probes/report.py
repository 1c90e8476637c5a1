"""What `verify probe` found: one tree of records, and its JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verify.evidence.strict_json import decode, dumps, encode, loads
from verify.probes.functions import FunctionProbe
from verify.probes.matrix import MatrixProbe
from verify.probes.order import OrderProbe

SCHEMA_VERSION = 1
PAGE = "probes.md"


@dataclass(frozen=True)
class ProbeNotRun:
    """A probe that was not run, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class ProbeReport:
    """All probes of one device.  device: `verify.machine.device.fingerprint`.  arch: compiled for
    ("sm_90a"), "" without a GPU."""

    device: dict[str, Any]
    arch: str = ""
    matrix: tuple[MatrixProbe, ...] = ()
    functions: tuple[FunctionProbe, ...] = ()
    orders: tuple[OrderProbe, ...] = ()
    not_run: tuple[ProbeNotRun, ...] = ()
    seconds: float = 0.0
    schema: int = SCHEMA_VERSION

    @property
    def agrees(self) -> bool:
        """Whether nothing that was measured speaks against the tables."""
        return all(found.agrees for found in self.matrix) and all(
            found.agrees for found in self.functions
        )

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of probes that ended in an error."""
        return tuple(f.name for f in self.matrix if f.error) + tuple(
            f.name for f in self.functions if f.error
        )


def as_data(report: ProbeReport) -> dict[str, Any]:
    """The report as JSON-ready data; "agrees" stands beside everything that has a table's entry to
    agree with."""
    data: dict[str, Any] = encode(report)
    data["agrees"] = report.agrees
    for name in ("matrix", "functions"):
        for found, shown in zip(getattr(report, name), data[name], strict=True):
            shown["agrees"] = found.agrees
    for probe, shown in zip(report.matrix, data["matrix"], strict=True):
        for name in ("structure", "specials"):
            for quantity, entry in zip(getattr(probe, name), shown[name], strict=True):
                entry["agrees"] = quantity.agrees
    return data


def write(report: ProbeReport, folder: Path, page: str) -> list[Path]:
    """Write probes.json and probes.md, which is `page`, into a folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "probes.json", folder / PAGE]
    paths[0].write_text(dumps(as_data(report), indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(page, encoding="utf-8")
    return paths


def read(path: Path) -> ProbeReport:
    """From probes.json; raises ValueError (a ShapeError names the place) for anything else."""
    return decode(ProbeReport, loads(path.read_text(encoding="utf-8")))
