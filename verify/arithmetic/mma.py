"""Matrix units: which one multiplies what, per architecture; what is known of it and what is
guessed.

The model is in `verify.arithmetic.unit`, the table with its sources in `verify.arithmetic.units`.
A CPU, and Triton's interpreter, add in fp32 with round-to-nearest in an order of their own.

The 8-bit units of sm_89 and sm_90 keep 13 fraction bits, of the accumulator too.  A kernel may
*promote*: begin at zero after so many products and add what it had to an accumulator in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from verify.arithmetic.archs import arch_named
from verify.arithmetic.dtypes import DTYPES
from verify.arithmetic.unit import AnyOf, Envelope, NearestChain, Promoted, Unit, Wiring
from verify.arithmetic.units import (
    BFLOAT16_SUMS,
    FMA32,
    FMA64,
    UNITS,
    bfloat16_blocks,
)

__all__ = [
    "Envelope",
    "NearestChain",
    "Promoted",
    "Provenance",
    "Unit",
    "Wiring",
    "accumulated",
    "bfloat16_blocks",
    "declared_unit",
    "provenance",
    "unit_for",
]

_EVERYWHERE = {"float32": FMA32, "float64": FMA64}
# By what is multiplied where sums are kept in bfloat16, whose own dot products may take subnormals
# as zero.
_ROUNDED = {
    "float16": BFLOAT16_SUMS,
    "bfloat16": replace(BFLOAT16_SUMS, flush=2.0**-126),
    "float32": BFLOAT16_SUMS,
}


def unit_for(arch: str, operands: str, accumulator: str = "float32", instruction: str = "") -> Unit:
    """The unit that multiplies `operands` on `arch` ("sm_90", "cpu"): "float16", "bfloat16",
    "tf32", "float8_e4m3fn"...

    accumulator: "float32", "float16" or, rounded after every product, "bfloat16"; that of fp64
    operands is fp64.  instruction: "mma.sync", "mma.sync.m16n8k16" (8 bits), "wgmma" or "tcgen05";
    "" for the most pessimistic that the architecture has. An unknown generation ("sm_999"), or a
    type that its table lacks, gets the most pessimistic entry of that type; see `provenance`.
    Raises ValueError for a word that names no architecture, operands that no table has with that
    accumulator, or an instruction that the arch has not for them.
    """
    found = arch_named(arch)
    if accumulator == "bfloat16" and operands in _ROUNDED:
        return _ROUNDED[operands]
    if operands in _EVERYWHERE:
        return _EVERYWHERE[operands]
    row = _rows(operands, accumulator).get(found.borrows or found.name)
    if row is None:
        return _pessimist(operands, accumulator)[1]
    if instruction not in row:
        raise ValueError(
            f"no {instruction!r} is known for {operands} on {found.name}, only"
            f" {', '.join(filter(None, row))}"
        )
    return row[instruction]


def declared_unit(
    arch: str, operands: str, accumulator: str = "float32", instruction: str = "any"
) -> Unit:
    """The unit that bounds a kernel which declares that instruction: "any", or one of
    `archs.INSTRUCTIONS`.

    It bounds every shape of the instruction.  One that the architecture has, but the tables do not
    tell apart, is bounded by the most pessimistic unit; so is everything where there are no matrix
    instructions, or none that are known.  Raises ValueError as `unit_for` does, and for an
    instruction that the architecture has not.
    """
    found = arch_named(arch)
    worst = unit_for(arch, operands, accumulator)
    if instruction == "any" or not found.instructions or operands in _EVERYWHERE:
        return worst
    if instruction == "fma":  # as the interpreter, which has no matrix unit, adds
        return unit_for("interpreter", operands, accumulator)
    if instruction not in found.instructions:
        raise ValueError(
            f"products.instruction: {found.name} has no {instruction}, only"
            f" {', '.join((*found.instructions, 'fma'))}"
        )
    row = _rows(operands, accumulator).get(found.borrows or found.name, {})
    return row.get(f"{instruction}.*") or row.get(instruction) or worst


def _rows(operands: str, accumulator: str) -> dict[str, dict[str, Unit]]:
    kind = "float8" if operands in ("float8_e4m3fn", "float8_e5m2") else operands
    try:
        return UNITS[kind, accumulator]
    except KeyError:
        message = (
            f"no matrix unit is known for operands of type {operands!r} that accumulates in"
            f" {accumulator}"
        )
        raise ValueError(message) from None


def _pessimist(operands: str, accumulator: str) -> tuple[str, Unit]:
    """The GPU's entry with the largest kappa, and whose it is."""
    rows = {
        arch: row[""]
        for arch, row in _rows(operands, accumulator).items()
        if arch.startswith("sm_")
    }
    return max(rows.items(), key=lambda item: item[1].kappa(1024))


def accumulated(unit: Unit, promotion: int, block: int = 0, blocks: int = 1) -> Unit:
    """The unit as a kernel uses it whose sums go over `blocks` of `block` terms each, and whose
    accumulator is rescaled between them, in its own dtype; promotion: products after which it is
    added to one in fp32, 0 for never.

    A unit that keeps fp32's bits of its accumulator is returned as it is: promoted or not, it errs
    by no more than one chain.
    """
    narrow = DTYPES[unit.accumulator].precision < DTYPES["float32"].precision
    if isinstance(unit, (NearestChain, Promoted, AnyOf)):
        return unit  # promotion only shortens its longest path
    if unit.fraction >= DTYPES["float32"].precision - 1 and not (narrow and promotion):
        return unit
    if not promotion:
        # What is rescaled has the accumulator's bits: fp16's are never more than F.
        return unit if narrow else replace(unit, restarts=blocks - 1)
    # Parts that do not fit into the blocks a whole number of times may run over their ends.
    restarts = (
        0
        if narrow or blocks == 1 or block % promotion == 0
        else min(math.ceil(promotion / block), blocks - 1)
    )
    own = {f.name: getattr(unit, f.name) for f in fields(Unit)} | {"restarts": restarts}
    parts = isinstance(unit, Envelope) and unit.parts
    return Promoted(**own, every=promotion, parts=parts)


@dataclass(frozen=True)
class Provenance:
    """Where a unit is from.  kind: "table", "borrowed" from an arch that is the same, or "guess".
    sentence: for a report."""

    kind: str
    sentence: str

    @property
    def guess(self) -> bool:
        return self.kind == "guess"


def provenance(arch: str, operands: str, accumulator: str = "float32") -> Provenance:
    """Whether `unit_for` knows or guesses, and from what.  Raises ValueError as it does."""
    unit, kind = unit_for(arch, operands, accumulator), "table"
    found = arch_named(arch)
    what = f"{operands} into {unit.accumulator}"
    if operands in _EVERYWHERE or accumulator == "bfloat16":
        return Provenance(kind, f"{what} anywhere: {unit.source}")
    source = found.borrows or found.name
    if found.borrows:
        kind = "borrowed"
    if source not in _rows(operands, accumulator):
        lacks = (
            f"the tables have no unit of {found.name} for {what}"
            if found.listed
            else f"the tables do not know {found.name}"
        )
        return Provenance(
            "guess",
            f"{lacks}: the most pessimistic, {_pessimist(operands, accumulator)[0]}'s, is taken",
        )
    sums = (
        f"fused sums of {unit.products} with {unit.fraction} fraction bits, {unit.output} of them"
        " kept"
    )
    chained = "fp additions to nearest" if isinstance(unit, NearestChain) else sums
    told = f"{found.name}, {what}: {chained} ({unit.source})"
    return Provenance(kind, f"{told}, as on {source}: {found.why}" if found.borrows else told)
