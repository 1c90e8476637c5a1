"""racecheck and what Triton adds to a kernel of partitions: the one exception, against what the
tool left of a right kernel on an H100."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from verify.sanitizers.exceptions import WAIVERS
from verify.sanitizers.facts import Facts, Judgement, collect, judge
from verify.sanitizers.fault import PlantedFault
from verify.sanitizers.planted import GLUON
from verify.sanitizers.records import Record, read_records
from verify.sanitizers.results import PlantedSession, unused
from verify.sanitizers.session import Session, Subject
from verify.sanitizers.tool import ALL, ERROR_EXIT, LOG, TOOLS, XML

DATA = Path(__file__).with_name("data") / "2025.3.1.0-partitions"
(WAIVER,) = WAIVERS
(TWIN,) = (fault for fault in GLUON if fault.variant == WAIVER.shown_by)
DEF, LAST = 212, 289  # of `turnstile_forward`, when these files were written


@pytest.fixture(name="source")
def _source(tmp_path: Path) -> Path:
    """A file with a function of that name between these lines."""
    lines = ["\n"] * (DEF - 1)
    lines += ["def turnstile_forward(\n", "    q,\n", "):\n"] + ["    q += 1\n"] * (LAST - DEF - 3)
    path = tmp_path / "hopper_turnstile.py"
    path.write_text("".join([*lines, "    close_ring(\n", "        q,\n", "    )\n"]))
    return path


def records_of(name: str, source: Path) -> tuple[Record, ...]:
    text = (DATA / f"{name}.xml").read_text(encoding="utf-8")
    path = f"/src/attention/kernels/gluon/{source.name}"
    return read_records(text.replace(path, str(source)), "racecheck")


def facts_of(name: str, source: Path, folder: Path) -> Facts:
    for kept, own in ((".xml", XML), (".log", LOG)):
        text = (DATA / f"{name}{kept}").read_text(encoding="utf-8")
        path = f"/src/attention/kernels/gluon/{source.name}"
        (folder / own).write_text(text.replace(path, str(source)))
    return replace(collect("racecheck", folder, ERROR_EXIT, (), 0), expected_cases=0)


@pytest.mark.parametrize("name", ["turnstile-0", "turnstile-2"])
def test_what_the_tool_left_of_a_right_kernel_is_covered(
    name: str, source: Path, tmp_path: Path
) -> None:
    facts = facts_of(name, source, tmp_path)
    assert facts.records is not None
    assert len(facts.records) == 2
    assert all(WAIVER.covers(record) for record in facts.records)
    accused, excused = judge(facts, ()), judge(facts)
    assert (accused.outcome, len(accused.records)) == ("faulty", 2)
    assert (excused.records, excused.waived) == ((), (WAIVER,))


def test_a_race_with_a_line_of_the_kernel_is_not(source: Path) -> None:
    (first, *_) = records_of("turnstile-0", source)
    assert first.against == (f"{source}:{DEF}", f"{source}:{LAST}")
    inside, other = f"{source}:{DEF + 20}", f"{source}x:{DEF}"
    for wrong in (
        {"source": inside},
        {"source": f"{source}:{LAST}"},
        {"source": ""},
        {"against": (*first.against, inside)},
        {"against": (f"{source}:{LAST - 1}",)},
        {"against": (f"{source}:{LAST + 3}",)},
        {"against": (other,)},
        {"against": ("",)},
        {"against": ()},
        {"kernel": "turnstile"},
        {"kind": "Precise"},
        {"tool": "memcheck"},
        {"unknown": ("colour",)},
    ):
        assert not WAIVER.covers(replace(first, **wrong)), wrong  # type: ignore[arg-type]
    assert WAIVER.covers(replace(first, against=(f"{source}:{LAST + 2}",)))
    source.write_text(source.read_text() + "\n\ndef turnstile_forward(q):\n    pass\n")
    assert not WAIVER.covers(first)  # which of the two is meant is not known
    source.write_text("def turnstile_forward(:\n")
    assert not WAIVER.covers(first)


def session_of(fault: PlantedFault, tool: str, judgement: Judgement) -> PlantedSession:
    tried = cast(Subject, SimpleNamespace(cases=("one",)))
    facts = cast(Facts, SimpleNamespace())
    return PlantedSession(fault, Session(tool, tried, judgement, 0.0, facts))


def test_the_exception_is_dead_where_its_twin_was_tried_without_a_record() -> None:
    clean, waived = Judgement("clean"), Judgement("clean", waived=(WAIVER,))
    assert unused(WAIVERS, [], []) == []
    assert unused(WAIVERS, [session_of(TWIN, "memcheck", clean)], []) == []
    assert unused(WAIVERS, [session_of(TWIN, "racecheck", clean)], []) == [WAIVER]
    assert unused(WAIVERS, [session_of(TWIN, "racecheck", waived)], []) == []


def test_the_twin_is_tried_under_every_tool_but_delays() -> None:
    assert TWIN.twin
    assert set(TWIN.tried_under(ALL)) == {*TOOLS, "consan"}
