"""Probe of one matrix instruction: its structure and special values are compared with the table's
unit, and a million results with the model, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from verify.arithmetic.dot import fused_dot
from verify.arithmetic.mma import provenance, unit_for
from verify.arithmetic.unit import Envelope, Unit
from verify.probes.agreement import DOTS, Agreement, agree
from verify.probes.instructions import Bench, Dot, Instruction
from verify.probes.lab import Lab
from verify.probes.specials import specials
from verify.probes.structure import measure


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


def table_unit(arch: str, instruction: Instruction) -> Unit | None:
    """The table's unit for an instruction on an architecture such as "sm_90", or None if the table
    has none with known bits."""
    for name in (f"{instruction.kind}.{instruction.shape}", instruction.kind):
        try:
            unit = unit_for(arch, instruction.operands, instruction.accumulator, name)
        except ValueError:
            continue
        return None if isinstance(unit, Envelope) else unit
    return None


def probe(bench: Bench, arch: str, dots: int = DOTS) -> MatrixProbe:
    """Probe one instruction.  The result holds errors and all measurements that succeeded.

    arch: for the table, such as "sm_90".
    """
    begun, instruction = time.perf_counter(), bench.instruction
    result, errors = MatrixProbe(instruction.name), []
    source = provenance(arch, instruction.operands, instruction.accumulator)
    unit = None if source.guess else table_unit(arch, instruction)
    source_text = unit.source if unit is not None and source.kind == "table" else source.sentence
    result = replace(result, table=source_text, guess=source.guess)
    device, model = (
        Lab(instruction, bench.dot),
        None if unit is None else Lab(instruction, _model(unit)),
    )

    def structure(known: MatrixProbe) -> MatrixProbe:
        return replace(known, structure=_pairs(measure(device), measure(model) if model else {}))

    def special(known: MatrixProbe) -> MatrixProbe:
        return replace(known, specials=_pairs(specials(device), specials(model) if model else {}))

    def agreement(known: MatrixProbe) -> MatrixProbe:
        return (
            replace(known, agreement=agree(instruction, bench.tiles, model.dot, dots))
            if model
            else known
        )

    for step in (structure, special, agreement):
        try:
            result = step(result)
        except Exception as error:
            errors.append(f"{step.__name__}: {type(error).__name__}: {error}")
    return replace(result, error="; ".join(errors), seconds=round(time.perf_counter() - begun, 3))


def _model(unit: Unit) -> Dot:
    return lambda a, b, c: fused_dot(a, b, c, unit)


def _pairs(measured: Mapping[str, str], expected: Mapping[str, str]) -> tuple[Quantity, ...]:
    return tuple(Quantity(name, value, expected.get(name, "")) for name, value in measured.items())
