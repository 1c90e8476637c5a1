"""The journal: what was appended is read back, and a line cut short is no event."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from verify.campaign.leases.events import Begun, Done, Drawn, Given
from verify.campaign.leases.journal import NAME, Journal, JournalError, read

EVENTS = (
    Begun("asked", (0, 1), "now"),
    Given("l", "w"),
    Done("l", "w", "d", 1.5, cases=3, drawn=(Drawn("v", "float16", "accuracy", 3, 1),)),
)


def test_events_come_back_in_order(tmp_path: Path) -> None:
    assert list(read(tmp_path)) == []
    for event in EVENTS:  # each by a process of its own
        journal = Journal(tmp_path)
        journal.append(event)
        journal.close()
    assert tuple(read(tmp_path)) == EVENTS


@pytest.mark.parametrize("kept", [1, 10, -2])
def test_a_torn_line_is_no_event(tmp_path: Path, kept: int) -> None:
    journal = Journal(tmp_path)
    for event in EVENTS:
        journal.append(event)
    journal.close()
    file = tmp_path / NAME
    text = file.read_bytes()
    begin = text[:-1].rfind(b"\n") + 1
    os.truncate(file, begin + kept if kept > 0 else len(text) + kept)
    again = Journal(tmp_path)
    again.append(EVENTS[1])
    again.close()
    assert tuple(read(tmp_path)) == (*EVENTS[:2], EVENTS[1])


def test_a_line_of_another_format_is_an_error(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"type":"given","lease":1,"worker":"w"}\n')
    with pytest.raises(JournalError, match=r"journal\.jsonl:1: .*lease"):
        list(read(tmp_path))
