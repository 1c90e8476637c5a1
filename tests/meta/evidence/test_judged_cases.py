"""The count of judged cases over several runs (tests/harness/judged_cases.py)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.harness import judged_cases
from tests.harness.fake_campaign import DEVICE, entry, verdict
from tests.harness.judged_cases import tally
from verify.evidence import Recorder, RunInfo, VariantEntry, Verdict

FORWARD = entry("triton-forward")
BACKWARD = entry("triton-backward", entries=("backward",))
OTHER = entry("cute-forward")
SOURCES = {one.ref: one.source_hash for one in (FORWARD, BACKWARD, OTHER)}


def run(place: Path, name: str, variants: list[VariantEntry], verdicts: list[Verdict]) -> Path:
    with Recorder(place / name) as recorder:
        recorder.write(
            RunInfo(run=name, started="2026-01-01T00:00:00", profile="gpu", device=DEVICE)
        )
        for one in variants:
            recorder.write(one)
        for judged in verdicts:
            recorder.write(judged)
    return place / name


def of(one: VariantEntry, index: int, **changes: object) -> Verdict:
    return verdict(one.ref, "float16", index, outcome="pass", **changes)


def test_a_case_counts_once_over_oracles_and_runs(tmp_path: Path) -> None:
    same = of(FORWARD, 0)
    first = run(tmp_path, "first", [FORWARD], [same, replace(same, oracle="other")])
    second = run(tmp_path, "second", [FORWARD], [same, of(FORWARD, 1)])
    assert tally([first, second], SOURCES).rows() == [
        ("triton", "forward", "", 2, 0),
        ("triton", "forward", "triton-forward", 2, 0),
    ]


def test_families_and_directions_are_apart(tmp_path: Path) -> None:
    known = [FORWARD, BACKWARD, OTHER]
    verdicts = [of(FORWARD, 0), of(BACKWARD, 1), of(BACKWARD, 2), of(OTHER, 3)]
    sums = [
        row for row in tally([run(tmp_path, "a", known, verdicts)], SOURCES).rows() if not row[2]
    ]
    assert sums == [
        ("cute", "forward", "", 1, 0),
        ("triton", "backward", "", 2, 0),
        ("triton", "forward", "", 1, 0),
    ]


def test_only_judged_cases_count(tmp_path: Path) -> None:
    verdicts = [
        of(FORWARD, 0),
        replace(of(FORWARD, 1), outcome="inapplicable"),
        replace(of(FORWARD, 2), phase="shrink"),
        replace(of(FORWARD, 3), outcome="fail"),
    ]
    rows = tally([run(tmp_path, "a", [FORWARD], verdicts)], SOURCES).rows()
    assert rows[0] == ("triton", "forward", "", 2, 1)


def test_another_source_does_not_count(tmp_path: Path) -> None:
    older = replace(FORWARD, source_hash="0" * 16)
    folders = [
        run(tmp_path, "older", [older], [of(FORWARD, 0)]),
        run(tmp_path, "both", [older, FORWARD], [of(FORWARD, 1)]),  # which one it judged is unknown
        run(tmp_path, "now", [FORWARD], [of(FORWARD, 2)]),
    ]
    counted = tally(folders, SOURCES)
    assert counted.cases["triton-forward"] == {of(FORWARD, 2).case}
    assert counted.stale["triton-forward"] == {of(FORWARD, 0).case, of(FORWARD, 1).case}


def test_the_command_prints_a_table_and_refuses_what_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = replace(BACKWARD, source_hash="0" * 16)
    here = SimpleNamespace(declarations=(FORWARD, changed))
    monkeypatch.setattr(judged_cases, "roster", lambda: here)
    verdicts = [of(FORWARD, 0), of(FORWARD, 1), of(BACKWARD, 2)]
    folder = run(tmp_path, "a", [FORWARD, BACKWARD], verdicts)
    assert judged_cases.main([str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "| triton | forward | triton-forward | 2 | 0 |" in shown
    assert "2 judged cases of the present sources in 1 runs" in shown
    assert "not counted, of another source: 1 of triton-backward" in shown
    assert judged_cases.main([str(tmp_path / "none")]) == 3
    assert "is no run directory" in capsys.readouterr().err
