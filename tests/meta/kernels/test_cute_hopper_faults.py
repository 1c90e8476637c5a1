"""Faults that a kernel's author makes, planted into the forwards for Hopper on the CPU: an oracle
convicts each of them by its question, which the kernels as they are pass.

docs/cute.md has the table.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kernels.cute import hopper_forward
from tests.harness import cute_hopper_fp8_host as fp8
from tests.harness import cute_hopper_host as forward
from tests.harness import hopper_forward_faults, hopper_fp8_faults
from tests.harness.cute_hopper_host import Program, encode, encoding
from tests.harness.cute_hopper_trial import convicting
from tests.harness.cute_host import has_headers, has_host, library_of_all
from tests.harness.hopper_faults import Fault, Switch, switched
from tests.properties.tier import thorough
from verify.bundle import ROOT

TABLE = ROOT / "docs" / "cute.md"
FAULTS = hopper_forward_faults.FAULTS
FP8_FAULTS = hopper_fp8_faults.FAULTS
EQUIVALENT = hopper_forward_faults.EQUIVALENT


def first(telling: Sequence[str], every: dict[str, Fault]) -> list[object]:
    """All names, those that tell most as they are, the others of the thorough tier."""
    others = [name for name in every if name not in telling]
    return thorough([*telling, *others], keep=len(telling))


def asked(faults: dict[str, Fault]) -> list[tuple[str, str]]:
    """Every build and question by which one of the faults is shown."""
    return sorted({(fault.build, fault.problem) for fault in faults.values()})


# Switches.


def test_a_switch_takes_one_place_and_keeps_the_lines() -> None:
    text = "a = b + c;\nf(b);\ng();\nh();\n"
    faults = [
        (Switch("b", "d", before="a = "),),
        (Switch("b", "e", before="a = "), Switch("g();\nh();", "h(); g();")),
    ]
    made = switched({"one": text}, faults)["one"]
    assert made.splitlines() == [
        "a = (planted == 0 ? (d) : planted == 1 ? (e) : (b)) + c;",
        "f(b);",
        "if (planted == 1) { h(); g(); } else { g(); h(); }",
        "",
    ]


@pytest.mark.parametrize("right", ["b", "x"])
def test_a_switch_of_two_places_or_none_is_refused(right: str) -> None:
    with pytest.raises(ValueError, match="times, not once"):
        switched({"one": "b + b"}, [(Switch(right, "c"),)])


# The table.


@pytest.mark.parametrize("faults", [FAULTS, FP8_FAULTS], ids=["forward", "fp8"])
def test_the_table_says_which_oracle_convicts(faults: dict[str, Fault]) -> None:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    for name, fault in faults.items():
        assert lines.count(f"| {name} | {fault.by} |") == 1, name


def test_the_telling_ones_are_faults_and_show_every_oracle() -> None:
    for telling, faults in (
        (hopper_forward_faults.TELLING, FAULTS),
        (hopper_fp8_faults.TELLING, FP8_FAULTS),
    ):
        assert {faults[name].by for name in telling} <= {fault.by for fault in faults.values()}
    shown = {FAULTS[name].by for name in hopper_forward_faults.TELLING}
    assert shown == {fault.by for fault in FAULTS.values()}


# The sources on the CPU.


def mend(library: ctypes.CDLL) -> None:
    library.weaken(0, -1, False)
    library.plant(-1)
    library.slow(0)


@pytest.fixture(autouse=True)
def encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_forward, "encode", encode)


def planted(
    name: str, fault: Fault, of: Any, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make the fault that of the library; of: the harness's module."""
    monkeypatch.setattr(hopper_forward, "encode", encoding(fault))
    library.plant([*of.PLANTED].index(name))
    library.slow(of.ROLES[fault.slow] if fault.slow else 0)


@has_headers
@has_host
@pytest.mark.for_ci
class TestForward:
    @pytest.fixture
    def library(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
        loaded = library_of_all(tmp_path_factory, "cute-hopper", forward.compiled)
        mend(loaded)
        yield loaded
        mend(loaded)

    def program(self, library: ctypes.CDLL, name: str) -> Program:
        entry = library[f"run_{name}"]
        entry.restype = ctypes.c_char_p
        return Program(library, entry, *forward.BUILDS[name])

    @pytest.mark.parametrize(("build", "problem"), asked(FAULTS))
    def test_the_kernel_passes_the_questions(
        self, library: ctypes.CDLL, build: str, problem: str
    ) -> None:
        program = self.program(library, build)
        assert convicting(program, problem) == ""
        library.slow(forward.ROLES["products"])
        assert convicting(program, problem) == ""

    @pytest.mark.parametrize("name", first(hopper_forward_faults.TELLING, FAULTS))
    def test_a_planted_fault_is_convicted(
        self, library: ctypes.CDLL, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fault = FAULTS[name]
        planted(name, fault, forward, library, monkeypatch)
        assert convicting(self.program(library, fault.build), fault.problem) == fault.by

    @pytest.mark.thorough
    @pytest.mark.parametrize("name", EQUIVALENT)
    def test_an_equivalent_one_passes_every_question(
        self, library: ctypes.CDLL, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        planted(name, EQUIVALENT[name], forward, library, monkeypatch)
        program = self.program(library, EQUIVALENT[name].build)
        for problem in sorted({fault.problem for fault in FAULTS.values()}):
            assert convicting(program, problem) == ""


@has_headers
@has_host
@pytest.mark.for_ci
class TestEightBits:
    @pytest.fixture
    def library(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
        loaded = library_of_all(tmp_path_factory, "cute-hopper-fp8", fp8.compiled)
        mend(loaded)
        yield loaded
        mend(loaded)

    @pytest.mark.parametrize(("build", "problem"), asked(FP8_FAULTS))
    def test_the_kernel_passes_the_questions(
        self, library: ctypes.CDLL, build: str, problem: str
    ) -> None:
        program = fp8.program_of(build, library)
        assert convicting(program, problem) == ""
        library.slow(fp8.ROLES["products"])
        assert convicting(program, problem) == ""

    @pytest.mark.parametrize("name", first(hopper_fp8_faults.TELLING, FP8_FAULTS))
    def test_a_planted_fault_is_convicted(
        self, library: ctypes.CDLL, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fault = FP8_FAULTS[name]
        planted(name, fault, fp8, library, monkeypatch)
        assert convicting(fp8.program_of(fault.build, library), fault.problem) == fault.by
