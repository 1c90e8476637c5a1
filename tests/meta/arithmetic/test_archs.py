"""Architectures are values: one is added from outside the tree, and everything takes it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.harness.declared import flat_gradients, flat_numerics
from tests.harness.fake_campaign import built
from tests.planted.builds import VARIANT
from verify.arithmetic import archs as table
from verify.arithmetic.archs import INSTRUCTIONS, Arch, arch_named, arch_of, archs, compiled_archs
from verify.arithmetic.dtypes import DTYPES
from verify.arithmetic.mma import declared_unit, provenance, unit_for
from verify.arithmetic.units import FMA32
from verify.bundle import ROOT
from verify.campaign.builds import arches, left_out
from verify.probes.instructions import INSTRUCTIONS as PROBED
from verify.report.resources import by_arch
from verify.variant import DeclarationError, Support, Variant, declaration_from

NEW = Arch(
    "sm_130", ("mma.sync", "tcgen05"), "a", compiled=True, borrows="sm_100", why="a test says so"
)


@pytest.fixture
def outside() -> Iterator[Arch]:
    table.register(NEW)
    yield NEW
    table.unregister(NEW.name)


def test_an_architecture_from_outside_is_known_everywhere(outside: Arch) -> None:
    for operands in ("float16", "bfloat16", "tf32", "float8_e4m3fn", "float32"):
        assert unit_for("sm_130a", operands) == unit_for("sm_100", operands)
    assert provenance("sm_130", "float16").kind == "borrowed"
    assert provenance("sm_130", "float16").sentence.endswith("as on sm_100: a test says so")
    assert arch_of((13, 0)) == arch_named("sm_130a") == outside
    # The compile list, and what a smaller profile says that it leaves out.
    declaration = declaration_from(VARIANT.describe(), ref="it", path="", source_hash="")
    chosen = {name: arches(name, [declaration])["it"] for name in ("dev", "gpu")}
    assert chosen["gpu"][-1] == compiled_archs()[-1] == "sm_130a"
    assert not left_out("gpu", chosen["gpu"])
    assert "sm_130a" in left_out("dev", chosen["dev"])
    # The rows of a report come in the order of the table, what it does not know last.
    builds = [built("x", arch, "one") for arch in ("sm_999", "sm_130a", "sm_90a")]
    assert [row["arch"] for row in by_arch(builds)] == ["sm_90a", "sm_130a", "sm_999"]
    assert "| sm_130 | mma.sync, tcgen05, fma | sm_130a | as sm_100: a test says so |" in (
        table.table()
    )
    # Probes and declarations know its instructions.
    assert all(
        (one.unsupported_on("sm_130a") is None) == (one.kind == "mma.sync")
        for one in PROBED
        if one.capability <= (13, 0)
    )
    assert declared_unit("sm_130", "float8_e4m3fn", "float32", "tcgen05") == (
        declared_unit("sm_100", "float8_e4m3fn", "float32", "tcgen05")
    )
    with pytest.raises(DeclarationError, match="sm_130 has no wmma"):
        declaring("wmma", capability=(13, 0))


def test_without_it_the_same_words_are_a_guess() -> None:
    assert not arch_named("sm_130").listed
    assert provenance("sm_130", "float16").guess
    assert "sm_130a" not in compiled_archs()
    declaring("wmma", capability=(13, 0))


def test_docs_have_the_table() -> None:
    assert table.table() in (ROOT / "docs" / "arithmetic.md").read_text()


def test_names_targets_and_capabilities() -> None:
    assert compiled_archs() == ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
    assert arch_named("cpu").capability is None
    for arch in archs():
        if arch.capability:
            assert arch_of(arch.capability) == arch_named(arch.target) == arch
            assert arch.suffix == ("a" if arch.capability >= (9, 0) else "")
        assert set(arch.instructions) < set(INSTRUCTIONS)
        assert not arch.borrows or not arch_named(arch.borrows).borrows
    assert arch_of((9, 9)).target == "sm_99a"
    assert arch_of((8, 1)).target == "sm_81"


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        (Arch("sm_90"), "arch: 'sm_90' is known already"),
        (Arch("sm_130", ("wmmma",)), "arch.instructions: 'wmmma' is none of mma.sync, wgmma"),
        (Arch("sm_130", borrows="sm_131"), "arch.borrows: 'sm_131' has no units of its own"),
        (Arch("sm_130", borrows="sm_86"), "arch.borrows: 'sm_86' has no units of its own"),
    ],
)
def test_a_wrong_entry_is_refused(arch: Arch, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table.register(arch)


# Declared instructions.

OPERANDS = ("float16", "bfloat16", "tf32", "tf32x3", "float8_e4m3fn", "float32")


def declaring(instruction: str, **support: object) -> Variant:
    claimed = Support(dtypes=("float16",), head_dims=(64,), **support)  # type: ignore[arg-type]
    return Variant(
        name="x",
        family="ptx",
        forward=print,
        support=claimed,
        numerics=flat_numerics(instruction=instruction),
    )


def test_any_is_the_unit_of_before() -> None:
    for arch, operands in itertools.product([*archs(), arch_named("sm_999")], OPERANDS):
        assert declared_unit(arch.name, operands) == unit_for(arch.name, operands)


def test_a_declared_instruction_never_widens_what_its_own_table_says() -> None:
    """Where the table knows an instruction apart, its bound is that of every shape, and no larger
    than that of any."""
    for arch, operands in itertools.product(archs(), OPERANDS):
        for word in arch.instructions:
            unit, worst = (
                declared_unit(arch.name, operands, "float32", word),
                unit_for(arch.name, operands),
            )
            assert all(unit.kappa(n) <= worst.kappa(n) for n in (1, 16, 32, 64, 1000))


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("accumulator", ["float32", "float16"])
@pytest.mark.parametrize("operands", ["float8_e4m3fn", "float8_e5m2"])
def test_mma_sync_of_8_bits_is_bounded_in_all_its_shapes(
    arch: str, accumulator: str, operands: str
) -> None:
    declared = declared_unit(arch, operands, accumulator, "mma.sync")
    for name in ("mma.sync", "mma.sync.m16n8k16"):
        unit = unit_for(arch, operands, accumulator, name)
        for n in (*range(1, 200), 1000, 4096, 100_000):
            assert declared.kappa(n) >= unit.kappa(n)
            assert declared.underflow(n) >= unit.underflow(n)
            largest = DTYPES[operands].max
            assert declared.domain(n) <= unit.domain(n)
            assert declared.misalignment(n, DTYPES[operands], largest) >= (
                unit.misalignment(n, DTYPES[operands], largest)
            )


def test_on_hopper_8_bits_by_mma_sync_keep_what_wgmma_loses() -> None:
    wgmma, by_sync = (
        declared_unit("sm_90", "float8_e4m3fn", "float32", word) for word in ("wgmma", "mma.sync")
    )
    assert wgmma == unit_for("sm_90", "float8_e4m3fn")
    assert wgmma.kappa(64) > 500 * by_sync.kappa(64)


def test_what_has_no_entry_of_its_own_falls_back_to_the_worst() -> None:
    for operands in OPERANDS:
        assert declared_unit("sm_90", operands, "float32", "wmma") == unit_for("sm_90", operands)
        for word in INSTRUCTIONS:
            # A guess stays a guess, and without matrix units a word about them says nothing.
            for arch in ("sm_999", "cpu", "interpreter"):
                if operands != "tf32x3" or arch == "sm_999":
                    assert declared_unit(arch, operands, "float32", word) == (
                        unit_for(arch, operands)
                    )
    assert declared_unit("sm_80", "float16", "float32", "fma") == FMA32


def test_an_instruction_that_the_architecture_lacks_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"^products.instruction: sm_90 has no tcgen05, only mma"):
        declared_unit("sm_90", "float16", "float32", "tcgen05")
    for word, capability, most in (
        ("tcgen05", (9, 0), (9, 0)),
        ("wgmma", (8, 0), None),
        ("wgmma", (9, 0), None),
    ):
        with pytest.raises(DeclarationError) as refused:
            declaring(word, capability=capability, max_capability=most)
        text = str(refused.value)
        assert text.startswith("numerics.products.instruction: sm_")
        assert f"has no {word}" in text
        assert "\n" not in text
    assert declaring("wgmma", capability=(9, 0), max_capability=(9, 9))
    assert declaring("tcgen05", capability=(10, 0), max_capability=(11, 9))
    for word in ("any", "fma", "mma.sync"):
        assert declaring(word)
    with pytest.raises(
        DeclarationError, match=r"gradients\.products\.instruction: sm_80 has no wgm"
    ):
        replace(
            declaring("any", capability=(8, 0)),
            backward=print,
            gradients=flat_gradients(instruction="wgmma"),
        )
