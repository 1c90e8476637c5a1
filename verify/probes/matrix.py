"""Probe of one matrix instruction: its structure and special values are compared with the table's
unit, and a million results with the model, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from verify.arithmetic.dot import fused_dot
from verify.arithmetic.mma import provenance, unit_for
from verify.arithmetic.unit import Envelope, Unit
from verify.probes.agreement import DOTS, agree
from verify.probes.instructions import Bench, Dot, Instruction
from verify.probes.lab import Lab
from verify.probes.report import MatrixProbe, Quantity
from verify.probes.specials import specials
from verify.probes.structure import measure


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
