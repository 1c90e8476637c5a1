"""The report of `verify probe` as records, and its JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verify.evidence.strict_json import decode, dumps, encode, loads
from verify.probes.conformance import ConformanceProbe
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
    """All probes of one device.

    device: `verify.machine.device.fingerprint`.  arch: the architecture compiled for ("sm_90a"), or
    "" without a GPU.
    """

    device: dict[str, Any]
    arch: str = ""
    matrix: tuple[MatrixProbe, ...] = ()
    functions: tuple[FunctionProbe, ...] = ()
    orders: tuple[OrderProbe, ...] = ()
    not_run: tuple[ProbeNotRun, ...] = ()
    conformance: tuple[ConformanceProbe, ...] = ()
    seconds: float = 0.0
    schema: int = SCHEMA_VERSION

    @property
    def agrees(self) -> bool:
        """Whether no measurement contradicts the tables or the manual."""
        return all(probe.agrees for probe in self.compared)

    @property
    def compared(self) -> tuple[MatrixProbe | FunctionProbe | ConformanceProbe, ...]:
        """The probes that have something to agree with."""
        return (*self.matrix, *self.functions, *self.conformance)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of probes that ended in an error."""
        return tuple(probe.name for probe in self.compared if probe.error)


def as_data(report: ProbeReport) -> dict[str, Any]:
    """The report as JSON-ready data, with "agrees" added to everything that is compared with a
    table or the manual."""
    data: dict[str, Any] = encode(report)
    data["agrees"] = report.agrees
    for name in ("matrix", "functions", "conformance"):
        for measured, probe_data in zip(getattr(report, name), data[name], strict=True):
            probe_data["agrees"] = measured.agrees
    for probe, probe_data in zip(report.matrix, data["matrix"], strict=True):
        for name in ("structure", "specials"):
            for quantity, entry in zip(getattr(probe, name), probe_data[name], strict=True):
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
    """Read probes.json.  Raises ValueError for a malformed file (a ShapeError names the place)."""
    return decode(ProbeReport, loads(path.read_text(encoding="utf-8")))
