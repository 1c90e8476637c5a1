"""A case that no oracle convicts takes one line of evidence, which is read as its verdicts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from verify.campaign import interruption
from verify.evidence import Recorder, Verdict, load
from verify.evidence.records import Finding, Passed

CASE = "a/b.py:v:m64:accuracy:sq=3,skv=5,d=16,dtype=float16,seed=7"
FIRST = Verdict(
    case=CASE,
    variant="a/b.py:v",
    config="m64",
    dtype="float16",
    oracle="execution",
    group="accuracy",
    outcome="pass",
    phase="generate",
    problem="sq=3,skv=5,d=16,dtype=float16,seed=7",
    seconds={"run": 0.25},
)
VERDICTS = [
    FIRST,
    replace(FIRST, oracle="bound", measures={"r_out": 0.5, "x": math.inf}, bins=("decode",)),
    replace(FIRST, oracle="graph", outcome="inapplicable"),
    replace(FIRST, oracle="gather", outcome="inapplicable", observed={"inapplicable": "a mask"}),
]


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "main.jsonl").read_text().splitlines()]


def written(folder: Path, verdicts: list[Verdict]) -> list[Verdict]:
    """The verdicts of a case, read back in their order."""
    with Recorder(folder) as recorder:
        recorder.write_case(verdicts)
    order = [each.oracle for each in verdicts]
    return sorted(load(folder).verdicts, key=lambda each: order.index(each.oracle))


def test_one_line_holds_all_that_several_would(tmp_path: Path) -> None:
    found = written(tmp_path, VERDICTS)
    assert [replace(each, time=0.0) for each in found] == VERDICTS
    assert len({each.time for each in found}) == 1
    assert found[0].time > 0
    (line,) = lines(tmp_path)
    assert set(line) == {
        *("kind", "case", "dtype", "phase", "seconds", "passing", "inapplicable", "told", "time")
    }
    assert [[*each] for each in line["told"]] == [  # type: ignore[attr-defined]
        ["oracle", "measures", "bins"],
        ["oracle", "observed"],
    ]


@pytest.mark.parametrize(
    "odd",
    [
        {"outcome": "fail", "finding": Finding(oracle="odd", message="off")},
        {"variant": "another"},
        {"phase": "shrink"},
        {"seconds": {"run": 0.5}},
        {"time": 3.0},
        {"oracle": "bound"},
    ],
    ids=lambda odd: next(iter(odd)),
)
def test_what_one_line_cannot_hold_has_a_line_each(odd: dict[str, object], tmp_path: Path) -> None:
    verdicts = [*VERDICTS, replace(FIRST, **({"oracle": "odd"} | odd))]  # type: ignore[arg-type]
    with Recorder(tmp_path) as recorder:
        recorder.write_case(verdicts)
    assert [line["kind"] for line in lines(tmp_path)] == ["verdict"] * 5


def test_a_measure_above_its_bound_is_a_failure_here_too(tmp_path: Path) -> None:
    found = written(tmp_path, [FIRST, replace(VERDICTS[1], measures={"r_out": 1.5})])
    assert [each.outcome for each in found] == ["pass", "fail"]


def test_a_case_that_is_no_id_keeps_its_verdicts(tmp_path: Path) -> None:
    odd = replace(FIRST, case="(file)", variant="(file)", config="", group="", problem="")
    assert Passed.of([odd]) is not None
    assert replace(written(tmp_path, [odd])[0], time=0.0) == odd


def test_such_a_case_is_not_interrupted(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.begin(CASE, "generate", "v")
        recorder.begin("another", "generate", "v", 1)
        recorder.write_case(VERDICTS)
    assert interruption.record(tmp_path, [recorder.path], "signal") == 1
    assert [each.case for each in load(tmp_path).interrupted] == ["another"]
