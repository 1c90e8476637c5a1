"""The report of `verify probe` as records, and its JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verify.evidence.strict_json import Number, decode, dumps, encode, loads

SCHEMA_VERSION = 1
MANUAL = "PTX ISA 9.1"
"""The manual that instructions are held against."""
PAGE = "probes.md"


@dataclass(frozen=True)
class Mismatch:
    """One dot product on which device and model differ, as bits in hexadecimal digits."""

    kind: str
    a: tuple[str, ...]
    b: tuple[str, ...]
    c: str
    device: str
    model: str


@dataclass(frozen=True)
class Agreement:
    """The comparison of a device with the model.

    by_kind: kind of input -> mismatches, if there are any.  nan: differing results that are both
    NaN.  first: the first mismatch of numbers, or else of NaNs.
    """

    dots: int
    mismatches: int
    nan: int
    by_kind: dict[str, int]
    first: Mismatch | None = None


@dataclass(frozen=True)
class Quantity:
    """A measured quantity, and the table's unit's result in the same experiment ("" if there is no
    such unit)."""

    name: str
    measured: str
    expected: str

    @property
    def agrees(self) -> bool:
        return self.measured == self.expected or not self.expected


@dataclass(frozen=True)
class MatrixProbe:
    """The results for one instruction.

    table: the source of its unit.  guess: the tables have no unit for this device.
    error: why results are missing, or "".
    """

    name: str
    table: str = ""
    guess: bool = False
    structure: tuple[Quantity, ...] = ()
    specials: tuple[Quantity, ...] = ()
    agreement: Agreement | None = None
    error: str = ""
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether no measurement contradicts the table."""
        same = self.agreement is None or not self.agreement.mismatches
        return same and all(quantity.agrees for quantity in (*self.structure, *self.specials))


@dataclass(frozen=True)
class Worst:
    """The largest value of an error, and its input: bits in hexadecimal digits, of both arguments
    if there are two."""

    value: Number
    at: str


@dataclass(frozen=True)
class FunctionProbe:
    """The results for one function.

    - inputs: their number.  exhaustive: they are all inputs, so that `ulp_bound`, the measured
      error plus the reference's, holds for every input.
    - ulp, relative: the largest errors over normal results of normal inputs, without those for
      which only the absolute error is bounded.  absolute: over the latter, if there are any.
    - table: the source of the table's entry.  ratio: error divided by the table's bound.
    - order, integers, subnormal_inputs, subnormal_results: as text.
    - edges: name of an input -> result bits.
    - error: why results are missing, or "".
    """

    name: str
    table: str = ""
    inputs: int = 0
    exhaustive: bool = False
    ulp: Worst | None = None
    ulp_bound: Number | None = None
    relative: Worst | None = None
    absolute: Worst | None = None
    ratio: Worst | None = None
    wrong: str = ""
    order: str = ""
    integers: str = ""
    subnormal_inputs: str = ""
    subnormal_results: str = ""
    edges: dict[str, str] | None = None
    error: str = ""
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether the table's bound holds, including the reference's error, and NaN results are
        right."""
        return self.ratio is None or (self.ratio.value * (1 + 2.0**-20) <= 1 and not self.wrong)


@dataclass(frozen=True)
class ConformanceProbe:
    """The results for one instruction.

    checks: trials, each of the complete state of a warp.  differing: how many of them do not leave
    what the manual says.  first: the first disagreement, or "".  error: why results are missing, or
    "".
    """

    name: str
    checks: int = 0
    differing: int = 0
    first: str = ""
    error: str = ""
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether no trial contradicts the manual."""
        return not self.differing


@dataclass(frozen=True)
class OrderProbe:
    """The order in which one config adds P V.

    order: as text.  groups: keys of the first groups of the chain, or of the first block's chain.
    reason: why the order is unknown, or "".
    """

    variant: str
    config: str
    dtype: str = ""
    keys: int = 0
    order: str = ""
    groups: tuple[str, ...] = ()
    launches: int = 0
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class GradientOrderProbe:
    """The order in which one config of a backward makes one of its sums, and the declared one.

    name: variant, dtype and sum.  mask: of the problem.  terms: their number.  order: as text.
    wrong: how it differs from the declared order, or "".  error: why the order is unknown, or "".
    """

    name: str
    config: str = ""
    declared: str = ""
    mask: str = ""
    terms: int = 0
    order: str = ""
    wrong: str = ""
    launches: int = 0
    error: str = ""
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether no sum contradicts the declaration."""
        return not self.wrong


Compared = MatrixProbe | FunctionProbe | ConformanceProbe | GradientOrderProbe
"""What has a table, a manual or a declaration to agree with."""


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
    gradient_orders: tuple[GradientOrderProbe, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether no measurement contradicts the tables, the manual or a declaration."""
        return all(probe.agrees for probe in self.compared)

    @property
    def compared(self) -> tuple[Compared, ...]:
        """The probes that have something to agree with."""
        return (*self.matrix, *self.functions, *self.conformance, *self.gradient_orders)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of probes that ended in an error."""
        return tuple(probe.name for probe in self.compared if probe.error)


def as_data(report: ProbeReport) -> dict[str, Any]:
    """The report as JSON-ready data, with "agrees" added to everything that is compared with a
    table, the manual or a declaration."""
    data: dict[str, Any] = encode(report)
    data["agrees"] = report.agrees
    for name in ("matrix", "functions", "conformance", "gradient_orders"):
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
    paths[0].write_text(dumps(as_data(report), depth=4) + "\n", encoding="utf-8")
    paths[1].write_text(page, encoding="utf-8")
    return paths


def read(path: Path) -> ProbeReport:
    """Read probes.json.  Raises ValueError for a malformed file (a ShapeError names the place)."""
    return decode(ProbeReport, loads(path.read_text(encoding="utf-8")))
