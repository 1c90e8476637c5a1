"""Every planted fault fits its source, passes the tests of other suites, and is caught by the same
oracles as before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import record, search
from tests.faults.catalogue import FAULTS
from tests.faults.classes import UNPLANTED
from tests.faults.fault import Fault
from tests.faults.rivals import RIVALS
from tests.faults.stand import Stand, finished, passes_allclose
from tests.properties import tier
from verify.cell.discovery import collection, roster
from verify.cell.process import PLAIN_CUDA, ROOT
from verify.oracles import groups
from verify.oracles.long import problems as long
from verify.problem import Problem

RECORD = record.load()
_SPREAD = [fault for start in range(7) for fault in FAULTS[start::7]]  # the first are of all kinds
KEPT = 20  # in the first tier
# The process of a kernel as it is serves all faults of it that follow each other.
ORDERED = _SPREAD[:KEPT] + sorted(_SPREAD[KEPT:], key=lambda fault: fault.file)


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    with Stand() as opened:
        yield opened


@pytest.fixture(scope="module")
def acquitted() -> set[tuple[str, str]]:
    """The unchanged kernels, and the cases that they passed."""
    return set()


def test_there_are_enough_of_them_and_most_are_of_classes_that_kernels_had() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 120
    assert (
        sum(
            not fault.source.startswith("none known")
            for fault in FAULTS
            if RECORD[fault.name].catches
        )
        >= 75
    )
    assert all(about and reason for about, reason in UNPLANTED)


def test_every_fault_is_on_record_and_what_escapes_has_its_reason() -> None:
    assert list(RECORD) == [fault.name for fault in FAULTS], "run python -m tests.faults"
    assert {name for name, entry in RECORD.items() if not entry.catches} == {
        fault.name for fault in FAULTS if fault.escapes
    }


def test_every_triton_variant_has_a_fault_that_is_caught() -> None:
    files: dict[str, list[str]] = {}
    triton = [path for path in collection() if path.parent == ROOT / "kernels" / "triton"]
    for declaration in roster(triton).declarations:
        files.setdefault(str(Path(declaration.path).relative_to(ROOT)), []).append(declaration.name)
    caught = {
        fault.on_trial or files[fault.file][0]
        for fault in FAULTS
        if RECORD[fault.name].catches and fault.file in files
    }
    assert caught == {name for names in files.values() for name in names}
    assert len(caught) >= 12


def test_the_table_is_that_of_the_record() -> None:
    assert all(list(entry.rivals) == [rival.name for rival in RIVALS] for entry in RECORD.values())
    assert record.DOCUMENT.read_text(encoding="utf-8") == record.document(RECORD)


def test_what_no_machine_without_a_gpu_is_asked_a_gpu_is_asked(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long, "environment", lambda: PLAIN_CUDA)
    for fault in FAULTS:
        if fault.asked:
            problem = Problem.parse(fault.asked)
            assert problem in long.forward_problems(stand.shipped(fault), problem.dtype)


@pytest.mark.for_ci
def test_a_search_again_finds_the_oracles_on_record(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {name: group for name, group in groups().items() if name in ("accuracy", "counting")}
    monkeypatch.setattr(search, "groups", lambda: asked)
    monkeypatch.setattr(search, "_LONGEST", 20)
    fault = next(fault for fault in FAULTS if fault.name == "guard-inverted")
    found = search.search(stand, fault)
    recorded = [catch for catch in RECORD[fault.name].catches if catch.group in asked]
    assert {(catch.group, catch.oracle) for catch in found} == {
        (catch.group, catch.oracle) for catch in recorded
    }
    assert {catch.group for catch in found} == set(asked)


@pytest.mark.first_look(6)
@pytest.mark.parametrize("fault", tier.for_ci(ORDERED, keep=KEPT), ids=lambda fault: fault.name)
def test_a_fault_passes_allclose_and_is_caught_all_the_same(
    fault: Fault, stand: Stand, acquitted: set[tuple[str, str]]
) -> None:
    planted, shipped = stand.planted(fault), stand.shipped(fault)
    assert fault.problem.distribution == "normal"
    trial = stand.run(planted, fault.problem, poison="zero")
    assert finished(trial) is not None
    assert passes_allclose(trial)
    catch = RECORD[fault.name].replay
    if catch is None:
        return
    assert search.convicts(stand, planted, catch), "the fault is not caught any more"
    case = shipped.ref, catch.id
    if case not in acquitted:
        assert not search.convicts(stand, shipped, catch), "the kernel as it is is convicted too"
        acquitted.add(case)
