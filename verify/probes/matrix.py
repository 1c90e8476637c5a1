"""One matrix instruction on trial: its structure and specials beside those of the table's unit, and
a million bits compared."""

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
    """Something measured, beside what the table's unit gives in the same experiment ("" where there
    is no such unit)."""

    name: str
    measured: str
    expected: str

    @property
    def agrees(self) -> bool:
        return self.measured == self.expected or not self.expected


@dataclass(frozen=True)
class MatrixProbe:
    """What was found of one instruction.  table: where its unit is from; guess: the tables do not
    know the device's.

    error: why nothing more was found, "" if nothing went wrong.
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
        """Whether nothing that was measured speaks against the table."""
        same = self.agreement is None or not self.agreement.mismatches
        return same and all(quantity.agrees for quantity in (*self.structure, *self.specials))


def table_unit(arch: str, instruction: Instruction) -> Unit | None:
    """The table's unit for an instruction on "sm_90", or None if it has none whose bits are
    known."""
    for name in (f"{instruction.kind}.{instruction.shape}", instruction.kind):
        try:
            unit = unit_for(arch, instruction.operands, instruction.accumulator, name)
        except ValueError:
            continue
        return None if isinstance(unit, Envelope) else unit
    return None


def probe(bench: Bench, arch: str, dots: int = DOTS) -> MatrixProbe:
    """Try one instruction; whatever goes wrong is in the result, beside what was measured all the
    same.

    arch: "sm_90", for the table.
    """
    begun, instruction = time.perf_counter(), bench.instruction
    found, errors = MatrixProbe(instruction.name), []
    source = provenance(arch, instruction.operands, instruction.accumulator)
    unit = None if source.guess else table_unit(arch, instruction)
    told = unit.source if unit is not None and source.kind == "table" else source.sentence
    found = replace(found, table=told, guess=source.guess)
    device, model = (
        Lab(instruction, bench.dot),
        None if unit is None else Lab(instruction, _model(unit)),
    )

    def structure(so_far: MatrixProbe) -> MatrixProbe:
        return replace(so_far, structure=_beside(measure(device), measure(model) if model else {}))

    def special(so_far: MatrixProbe) -> MatrixProbe:
        return replace(so_far, specials=_beside(specials(device), specials(model) if model else {}))

    def agreement(so_far: MatrixProbe) -> MatrixProbe:
        return (
            replace(so_far, agreement=agree(instruction, bench.tiles, model.dot, dots))
            if model
            else so_far
        )

    for step in (structure, special, agreement):
        try:
            found = step(found)
        except Exception as error:
            errors.append(f"{step.__name__}: {type(error).__name__}: {error}")
    return replace(found, error="; ".join(errors), seconds=round(time.perf_counter() - begun, 3))


def _model(unit: Unit) -> Dot:
    return lambda a, b, c: fused_dot(a, b, c, unit)


def _beside(measured: Mapping[str, str], expected: Mapping[str, str]) -> tuple[Quantity, ...]:
    return tuple(Quantity(name, value, expected.get(name, "")) for name, value in measured.items())
