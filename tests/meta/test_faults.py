"""Every planted fault fits its source, passes what others would test, and is caught where it was caught before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import record
from tests.faults.catalogue import FAULTS
from tests.faults.classes import UNPLANTED
from tests.faults.fault import Fault
from tests.faults.rivals import RIVALS
from tests.faults.search import convicts
from tests.faults.stand import Stand, finished, passes_allclose

RECORD = record.load()
SEARCHED = [fault for fault in FAULTS if fault.name in RECORD]
CAUGHT = [fault for fault in SEARCHED if RECORD[fault.name].catches]


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    with Stand() as opened:
        yield opened


def test_there_are_enough_of_them_and_most_are_of_classes_that_kernels_had() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert sum(not fault.source.startswith("none known") for fault in CAUGHT) >= 60
    assert all(about and reason for about, reason in UNPLANTED)


def test_the_record_and_its_table_are_those_of_the_catalogue() -> None:
    assert list(RECORD) == [fault.name for fault in SEARCHED], "run python -m tests.faults"
    assert all(list(entry.rivals) == [rival.name for rival in RIVALS] for entry in RECORD.values())
    assert record.DOCUMENT.read_text(encoding="utf-8") == record.document(RECORD)


@pytest.mark.parametrize("fault", SEARCHED, ids=lambda fault: fault.name)
def test_a_fault_passes_allclose_and_is_caught_all_the_same(fault: Fault, stand: Stand) -> None:
    planted, shipped = stand.planted(fault), stand.shipped(fault)
    assert fault.problem.distribution == "normal"
    trial = stand.run(planted, fault.problem, poison="zero")
    assert finished(trial) is not None
    assert passes_allclose(trial)
    catch = RECORD[fault.name].replay
    if catch is not None:
        assert convicts(stand, planted, catch), "the fault is not caught any more"
        assert not convicts(stand, shipped, catch), "the kernel as it is is convicted too"
