"""Files that compute-sanitizer wrote without a run, read by the lane's own reader.

data/VERSION-written was written by that version's own printer and XML writer, from records in its
own format that no run made: the elements and the words are the tool's, the values are not.  Files
of runs are beside them (test_recorded_runs.py).
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from verify.sanitizers.facts import CaseResult, Facts, collect, judge
from verify.sanitizers.planted import FAULTS
from verify.sanitizers.records import Record
from verify.sanitizers.tool import ERROR_EXIT, LOG, TOOLS, XML

DATA = Path(__file__).with_name("data")
VERSIONS = sorted(path.name for path in DATA.glob("*-written"))
CASE = CaseResult("variant:config:sanitizer:problem", "ok")


def recorded(version: str, tool: str, folder: Path) -> Facts:
    """The facts about a process that left the recorded files."""
    shutil.copy(DATA / version / f"{tool}.xml", folder / XML)
    shutil.copy(DATA / version / f"{tool}.log", folder / LOG)
    return collect(tool, folder, ERROR_EXIT, (CASE,), 1)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("tool", TOOLS)
def test_recorded_files_are_understood_and_show_their_planted_fault(
    version: str, tool: str, tmp_path: Path
) -> None:
    facts = recorded(version, tool, tmp_path)
    if facts.summary is not None and not facts.summary.errors:  # warnings alone
        facts = replace(facts, exit_code=0)
    judgement = judge(facts)
    assert judgement.outcome == "faulty"
    assert judgement.reasons == ()
    for record in judgement.records:
        assert (record.tool, record.unknown) == (tool, ())
        assert record.kind in record.words
        assert all((record.level, record.text, record.kernel, record.source))
    assert any(fault.shown_by(judgement) for fault in FAULTS if tool in fault.caught_by)


def records(tool: str, folder: Path) -> list[Record]:
    found = recorded("2025.3.1.0-written", tool, folder).records
    assert found is not None
    return [replace(record, words="") for record in found]


def test_memcheck_tells_the_nearest_allocation_in_its_log(tmp_path: Path) -> None:
    overrun, misaligned, shared = records("memcheck", tmp_path)
    assert overrun == Record(
        tool="memcheck",
        kind="Precise",
        level="Error",
        text="Invalid __global__ write of size 4 bytes is out of bounds",
        kernel="planted_overrun",
        source="/src/attention/tests/planted/tiny.cu:56",
        thread="(112, 0, 0)",
        block="(126, 0, 0)",
        address="0x7efcea83f7c0",
        size="4",
        nearest="1 bytes after the nearest allocation at 0x7efcea82fa00 of size 64960 bytes",
    )
    assert overrun.nearest in overrun.place
    assert misaligned.text.endswith("is misaligned")
    assert "__shared__" in shared.text
    assert misaligned.nearest == shared.nearest == ""


def test_racecheck_tells_both_accesses(tmp_path: Path) -> None:
    error, warning = records("racecheck", tmp_path)
    assert (error.level, warning.level) == ("Error", "Warning")
    assert error.text == (
        "Race condition: Write at /src/attention/tests/planted/tiny.cu:41"
        " against Read at /src/attention/tests/planted/tiny.cu:54"
    )


def test_initcheck_and_synccheck_have_no_level_and_count_as_errors(tmp_path: Path) -> None:
    (unwritten,) = records("initcheck", tmp_path)
    (divergent,) = records("synccheck", tmp_path)
    assert (unwritten.level, divergent.level) == ("Error", "Error")
    assert unwritten.text == "Uninitialized __global__ memory read of size 4 bytes"
    assert divergent.text == "Barrier error: Divergent thread(s) in warp"
