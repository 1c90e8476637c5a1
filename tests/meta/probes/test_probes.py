"""Tests of the matrix probes: they must recover every unit of the table, and see every planted
change of a unit."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.properties import tier
from verify.arithmetic.dot import fused_dot
from verify.arithmetic.mma import unit_for
from verify.arithmetic.unit import Envelope, NearestChain, Promoted, Unit, Wiring
from verify.arithmetic.units import UNITS
from verify.probes import agreement
from verify.probes.instructions import INSTRUCTIONS, Dot, Instruction, Tiles
from verify.probes.lab import Lab
from verify.probes.specials import specials
from verify.probes.structure import measure

torch.set_num_threads(1)

BY_NAME = {one.name: one for one in INSTRUCTIONS}
F16 = BY_NAME["mma.sync m16n8k16 f16 into f32"]


def model(unit: Unit) -> Dot:
    return lambda a, b, c: fused_dot(a, b, c, unit)


def tiles_of(instruction: Instruction, unit: Unit) -> Tiles:
    """A device that is the model."""

    def tiles(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return fused_dot(*agreement.as_sums(a, b, c), unit).view(c.shape)

    return tiles


def found(instruction: Instruction, unit: Unit) -> dict[str, str]:
    return measure(Lab(instruction, model(unit)))


# What the experiments recover.


ARCHES = ("sm_70", "sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120")


def rows() -> dict[str, tuple[Instruction, Unit]]:
    """Every fused unit of the table under every instruction that takes its operands, each once."""
    seen: dict[str, tuple[Instruction, Unit]] = {}
    for arch in ARCHES:
        for one in INSTRUCTIONS:
            for name in (f"{one.kind}.{one.shape}", one.kind, "tcgen05", ""):
                try:
                    unit = unit_for(arch, one.operands, one.accumulator, name)
                except ValueError:
                    continue
                whole = one.depth % max(len(unit.wiring.order), 1) == 0
                if (
                    whole
                    and not isinstance(unit, Envelope | NearestChain)
                    and (one, unit) not in seen.values()
                ):
                    seen[f"{arch} {name or 'any'}: {one.name}"] = (one, unit)
    return seen


ROWS = rows()


@pytest.mark.first_look(4)
@pytest.mark.parametrize("name", tier.for_ci(ROWS, keep=12))
def test_every_unit_of_the_table_is_recovered(name: str) -> None:
    one, unit = ROWS[name]
    quantities = found(one, unit)
    assert quantities["products per addition"] == str(min(unit.products, one.depth))
    assert quantities["fraction bits F"] == str(unit.fraction)
    assert quantities["alignment"] == "toward zero, each term"
    assert quantities["output bits p"] == str(unit.output)
    assert (
        quantities["output rounding"]
        == {"zero": "toward zero", "nearest": "to nearest, ties to even"}[unit.rounding]
    )
    promoted = isinstance(unit, Promoted)
    assert quantities["accumulator joins"] == (
        "after all products" if promoted else "aligned with the first products"
    )
    kept = 10 if one.accumulator == "float16" else 23 if promoted else unit.output
    rounding = (
        "toward zero" if unit.rounding == "zero" and not promoted else "to nearest, ties to even"
    )
    assert quantities["rounding of C + product"] == f"{rounding}, {kept} bits"
    assert quantities["subnormal operands"] == "kept"
    assert quantities["their alignment"] in ("as the smallest normal", "not measurable")
    if one.operands == "tf32":
        assert quantities["operand's low 13 bits"] == "dropped"


def test_the_table_has_been_gone_through() -> None:
    fused = [
        unit for by_arch in UNITS.values() for row in by_arch.values() for unit in row.values()
    ]
    known = {unit for unit in fused if not isinstance(unit, Envelope | NearestChain)}
    assert {unit for _, unit in ROWS.values()} == known
    assert {one for one, _ in ROWS.values()} == {
        one for one in INSTRUCTIONS if one.operands != "float64"
    }


HOPPER = Unit(16, 25, 23)
FP8 = Unit(32, 13, 13)
E5M2, E4M3 = BY_NAME["wgmma m64n8k32 e5m2 into f32"], BY_NAME["wgmma m64n8k32 e4m3 into f32"]
TF32 = BY_NAME["mma.sync m16n8k8 tf32 into f32"]
HALF = BY_NAME["mma.sync m16n8k16 f16 into f16"]


def wired(**changes: Any) -> Unit:
    return replace(HOPPER, wiring=Wiring(**changes))


PLANTED: dict[str, tuple[Instruction, Unit, dict[str, str]]] = {
    "L": (
        F16,
        replace(HOPPER, products=8),
        {"summation": "(0-7, C) -> (8-15)", "products per addition": "8"},
    ),
    "L of 4": (
        F16,
        replace(HOPPER, products=4),
        {"summation": "(0-3, C) -> (4-7) -> (8-11) -> (12-15)"},
    ),
    "L of 2": (TF32, replace(HOPPER, products=2), {"products per addition": "2"}),
    "F more": (F16, replace(HOPPER, fraction=26), {"fraction bits F": "26"}),
    "F less": (F16, replace(HOPPER, fraction=24), {"fraction bits F": "24"}),
    "F of fp8": (E4M3, replace(FP8, fraction=14), {"fraction bits F": "14", "output bits p": "13"}),
    "p of fp8": (
        E4M3,
        replace(FP8, fraction=25, output=23),
        {"output bits p": "23", "bits of C alone": "all 23"},
    ),
    "p": (
        E5M2,
        replace(FP8, fraction=25, output=14),
        {"output bits p": "14", "bits of C alone": "14"},
    ),
    "rounding": (
        F16,
        replace(HOPPER, rounding="nearest"),
        {"output rounding": "to nearest, ties to even"},
    ),
    "rounding of fp16": (
        HALF,
        Unit(16, 25, 10, accumulator="float16"),
        {"output rounding": "toward zero", "rounding of C + product": "toward zero, 10 bits"},
    ),
    "C after": (
        F16,
        wired(addend="after"),
        {"accumulator joins": "after the first products, aligned with their sum"},
    ),
    "C after, fp8": (
        E4M3,
        replace(FP8, wiring=Wiring(addend="after")),
        {"accumulator joins": "after the first products, aligned with their sum"},
    ),
    "C after, fp16": (
        BY_NAME["wgmma m64n8k32 e4m3 into f16"],
        Unit(32, 25, 10, accumulator="float16", rounding="nearest", wiring=Wiring(addend="after")),
        {"accumulator joins": "after the first products, aligned with their sum"},
    ),
    "promotion": (F16, Promoted(16, 25, 23, every=16), {"accumulator joins": "after all products"}),
    "promotion of halves": (
        F16,
        Promoted(8, 25, 23, every=8),
        {
            "summation": "(((0-7) + C) + (8-15))",
            "products per addition": "8",
            "fraction bits F": "25",
            "output bits p": "23",
        },
    ),
    "normalised": (F16, wired(normalises=True), {"their alignment": "by its own exponent"}),
    "normalised e4m3": (
        E4M3,
        replace(FP8, wiring=Wiring(normalises=True)),
        {"their alignment": "by its own exponent"},
    ),
    "normalised tf32": (
        TF32,
        Unit(8, 25, 23, wiring=Wiring(normalises=True)),
        {"their alignment": "by its own exponent"},
    ),
    "order": (
        F16,
        replace(HOPPER, products=8, wiring=Wiring(order=(*range(8, 16), *range(8)))),
        {"summation": "(8-15, C) -> (0-7)"},
    ),
    "interleaved": (
        F16,
        replace(HOPPER, products=8, wiring=Wiring(order=(*range(0, 16, 2), *range(1, 16, 2)))),
        {"summation": "(0, 2, 4, 6, 8, 10, 12, 14, C) -> (1, 3, 5, 7, 9, 11, 13, 15)"},
    ),
    "fused multiply-adds": (
        TF32,
        NearestChain(1, 24, 24),
        {"products per addition": "1", "operand's low 13 bits": "kept"},
    ),
}


@pytest.mark.first_look(6)
@pytest.mark.parametrize("name", PLANTED)
def test_every_planted_unit_is_recovered(name: str) -> None:
    one, unit, wanted = PLANTED[name]
    got = found(one, unit)
    assert {key: got[key] for key in wanted} == wanted


def flushing(dot: Dot, operands: bool, results: bool) -> Dot:
    """A unit that treats subnormal operands, or subnormal results and accumulators, as zero."""

    def flushed(x: Tensor) -> Tensor:
        small = x.double().abs() < (2.0**-14 if x.dtype == torch.float16 else 2.0**-126)
        return torch.where(small, torch.zeros_like(x), x)

    def changed(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        if operands:
            a, b = flushed(a), flushed(b)
        return flushed(dot(a, b, flushed(c))) if results else dot(a, b, c)

    return changed


def test_flushed_subnormals_are_seen() -> None:
    dot = model(HOPPER)
    assert measure(Lab(F16, flushing(dot, True, False)))["subnormal operands"] == "zero"
    left = measure(
        Lab(F16, lambda a, b, c: flushing(lambda x, _, z: dot(x, b, z), True, False)(a, b, c))
    )
    assert left["subnormal operands"] == "zero in A, kept in B"
    bf16 = BY_NAME["mma.sync m16n8k16 bf16 into f32"]
    got = measure(Lab(bf16, flushing(dot, False, True)))
    assert (got["subnormal C"], got["subnormal results"]) == ("zero", "zero")


def test_another_treatment_of_low_bits_is_seen() -> None:
    def rounding(x: Tensor) -> Tensor:
        return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    dot = model(Unit(8, 25, 23))
    assert (
        measure(Lab(TF32, lambda a, b, c: dot(rounding(a), rounding(b), c)))[
            "operand's low 13 bits"
        ]
        == "rounded"
    )


def test_alignment_that_rounds_is_seen() -> None:
    """A unit that rounds each term to nearest at the alignment, and one that truncates their
    sum."""

    def aligned(rounded: Callable[[Tensor], Tensor], each: bool) -> Dot:
        def dot(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            terms = torch.cat([a.double() * b.double(), c.double()[:, None]], 1)
            most = torch.frexp(terms.abs().amax(1, keepdim=True)).exponent - 1
            scaled = terms * 2.0 ** (25 - most)
            total = rounded(scaled).sum(1) if each else rounded(scaled.sum(1))
            return (total * 2.0 ** (most[:, 0] - 25)).float()

        return dot

    assert (
        measure(Lab(F16, aligned(torch.round, True)))["alignment"]
        == "to nearest, ties to even, each term"
    )
    assert measure(Lab(F16, aligned(torch.floor, True)))["alignment"] == "down, each term"
    assert measure(Lab(F16, aligned(torch.trunc, False)))["alignment"] == "toward zero, the sum"


@pytest.mark.parametrize(
    ("change", "experiments"),
    [
        ({"nan": "quiet"}, {"inf 0", "NaN 1", "C = NaN"}),
        ({"overflow": "saturate"}, {"C = max, product 2 ulp"}),
        ({"zeros": "signed"}, {"minus a product of smallest subnormals"}),
        ({"zeros": "ieee"}, {"C = -0, products -0"}),
    ],
    ids=["nan quiet", "overflow saturates", "zeros signed", "zeros ieee"],
)
def test_special_values_tell_units_apart(change: dict[str, str], experiments: set[str]) -> None:
    bf16 = BY_NAME["mma.sync m16n8k16 bf16 into f32"]
    usual, other = (
        specials(Lab(bf16, model(unit)))
        for unit in (HOPPER, replace(HOPPER, wiring=Wiring(**change)))
    )
    differing = {name for name, bits in usual.items() if other[name] != bits}
    assert experiments <= differing
    assert len(differing) < len(usual) / 2


def test_generations_differ_in_one_special() -> None:
    """Results from Khattak and Mikaitis, arXiv 2512.07004, and from verify.arithmetic's units."""
    name = "C = 2^23, products -2^23, -1/2, -1/4, -1/8"
    for unit, result in (
        (Unit(4, 23, 23), 0.0),
        (Unit(8, 24, 23), -0.5),
        (Unit(16, 25, 23), -0.75),
    ):
        bits = specials(Lab(F16, model(unit)))[name]
        assert struct.unpack(">f", bytes.fromhex(bits)) == (result,)
