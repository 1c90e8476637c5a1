"""A newer compute-sanitizer than the machine's: what 2026.4 left on an H100, and when it counts.

data/2026.4.0.0 holds files of that run, as `test_recorded_runs` has them, and matrix.json: what
each tool said of each planted kernel.
"""

from __future__ import annotations

import json
import lzma
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from verify.sanitizers.facts import CaseResult, Facts, Judgement, collect, judge
from verify.sanitizers.planted import FAULTS
from verify.sanitizers.results import PlantedSession, not_alive
from verify.sanitizers.session import Session, Subject
from verify.sanitizers.tool import ERROR_EXIT, SHARED_SPACE, SKEW, TOOLS, Sanitizer

VERSION = "2026.4.0.0"
DATA = Path(__file__).with_name("data") / VERSION
NEWER = Sanitizer("compute-sanitizer", VERSION, frozenset({SHARED_SPACE}))
OLDER = Sanitizer("compute-sanitizer", "2025.3.1.0")
BY_NAME = {fault.variant: fault.under(NEWER) for fault in FAULTS}
MATRIX = json.loads((DATA / "matrix.json").read_text(encoding="utf-8"))
# (tool, planted kernel) -> number of records of each kind and level, and what the summary counts.
SHOWN = {
    ("memcheck", "planted-overrun"): ({"Precise Error": 1}, 1),
    ("memcheck", "planted-overread"): ({"Precise Error": 1}, 1),
    ("racecheck", "planted-missing-barrier"): ({"Analysis Error": 1}, 1),
    ("racecheck", "planted-missing-mbarrier-wait"): ({"Analysis Error": 1}, 1),
    ("initcheck", "planted-unwritten-shared"): ({"Initcheck Error": 200}, 16256),
    ("synccheck", "planted-divergent-barrier"): ({"Synccheck Error": 200}, 508),
}
CLEAN = [(tool, "planted-correct") for tool in TOOLS]


def facts_of(tool: str, name: str, folder: Path) -> Facts:
    """The facts about a process that left the recorded files, with the exit code that agrees."""
    for path in (DATA / tool / name).iterdir():
        kept = path.read_bytes()
        whole = lzma.decompress(kept) if path.suffix == ".xz" else kept
        (folder / path.name.removesuffix(".xz")).write_bytes(whole)
    facts = collect(tool, folder, 0, (CaseResult("case", "ok"),), 1)
    errors = facts.summary is not None and facts.summary.errors
    return replace(facts, counted=True, exit_code=ERROR_EXIT if errors else 0)


def test_every_kept_file_is_read_by_a_test() -> None:
    kept = {(path.parent.name, path.name) for path in DATA.glob("*/*")}
    assert kept == {*CLEAN, *SHOWN}
    texts = (path.read_text() for path in DATA.rglob("*.*") if path.suffix not in {".xz", ".json"})
    folders = {place for text in texts for place in re.findall(r"(?<![\w./<])/[a-z]\w*/", text)}
    assert folders <= {"/src/"}


@pytest.mark.parametrize(("tool", "name"), CLEAN)
def test_its_clean_process_is_clean(tool: str, name: str, tmp_path: Path) -> None:
    assert judge(facts_of(tool, name, tmp_path)).outcome == "clean"


@pytest.mark.parametrize(("tool", "name"), SHOWN)
def test_its_records_are_read_and_show_the_fault(tool: str, name: str, tmp_path: Path) -> None:
    kinds, total = SHOWN[tool, name]
    judgement = judge(facts_of(tool, name, tmp_path))
    assert (judgement.outcome, judgement.total) == ("faulty", total)
    assert Counter(f"{each.kind} {each.level}" for each in judgement.records) == kinds
    assert not any(record.unknown for record in judgement.records)
    assert all(record.kernel and record.source for record in judgement.records)
    assert BY_NAME[name].shown_by(judgement) is not None


def test_its_matrix_is_complete_and_has_no_false_accusation() -> None:
    assert MATRIX["sanitizer"] == VERSION
    rows = {(row["variant"], row["tool"]): row for row in MATRIX["planted"]}
    required = [
        (fault.variant, tool)
        for fault in BY_NAME.values()
        if not (fault.spare or fault.by_triton)
        for tool in (*TOOLS, SKEW)
        if fault.wanted(tool) != "any" and tool in fault.tried_under((*TOOLS, SKEW))
    ]
    assert set(required) <= set(rows)
    for key in required:
        wanted = BY_NAME[key[0]].wanted(key[1])
        assert (rows[key]["wanted"], rows[key]["holds"]) == (wanted, True), key
        assert rows[key]["shown"] == (wanted == "caught")
    assert rows["planted-unwritten-shared", "initcheck"]["shown"]  # which the older does not see
    accused = {key for key, row in rows.items() if row["outcome"] == "faulty"}
    assert {name for name, _ in accused} <= {fault.variant for fault in FAULTS if not fault.twin}


@pytest.mark.parametrize(
    ("sanitizer", "outcome", "dead"),
    [
        (NEWER, "clean", {"initcheck"}),  # it has the option, and missed what the option is for
        (NEWER, "inconclusive", {"initcheck"}),
        (OLDER, "clean", set()),  # it has no such option
    ],
)
def test_it_is_believed_only_where_it_catches_what_it_can(
    sanitizer: Sanitizer, outcome: str, dead: set[str]
) -> None:
    (fault,) = (fault for fault in FAULTS if fault.variant == "planted-unwritten-shared")
    facts = Facts(
        tool="initcheck",
        exit_code=0,
        summary=None,
        records=(),
        results=(),
        expected_cases=1,
    )
    tried = cast(Subject, SimpleNamespace(cases=("one",)))
    session = Session("initcheck", tried, Judgement(outcome), 0.0, facts)
    planted = [PlantedSession(fault.under(sanitizer), session)]
    assert not_alive(("initcheck",), planted) == dead
