"""Which judge it was: its files are hashed when a run begins, and again at its end."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from verify import bundle
from verify.campaign import run, runner
from verify.cell.discovery import Roster, Unloadable
from verify.evidence import Evidence, RunInfo, judge_version
from verify.evidence.judge_version import judge_changed, judge_hash


def evidence(*hashes: str) -> Evidence:
    runs = [
        RunInfo(
            run=f"r{i}",
            started=f"2026010{i}T000000Z",
            profile="dev",
            device={},
            versions={"judge": h} if h else {},
        )
        for i, h in enumerate(hashes, 1)
    ]
    return Evidence(runs=tuple(runs))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small suite: two files that decide, and one that does not."""
    for name in ("verify/bound.py", "references/attention.py", "docs/page.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n", encoding="utf-8")
    monkeypatch.setattr(bundle, "ROOT", tmp_path)
    monkeypatch.setattr(bundle, "PACKAGE", tmp_path / "verify")
    return tmp_path


@pytest.mark.parametrize(
    "name", ["verify/bound.py", "references/attention.py", "verify/new.py", "verify/bound.cu"]
)
def test_a_change_of_what_decides_is_seen(tree: Path, name: str) -> None:
    begun = evidence(judge_hash())
    assert judge_changed(begun) is None
    (tree / "docs" / "page.py").write_text("x = 2\n", encoding="utf-8")
    assert judge_changed(begun) is None
    (tree / name).write_text("x = 2\n", encoding="utf-8")
    said = judge_changed(begun)
    assert said is not None
    assert judge_hash() in said
    assert "run again" in said


def test_the_last_beginning_counts_and_evidence_of_an_earlier_day_says_nothing(tree: Path) -> None:
    assert judge_changed(evidence("another", judge_hash())) is None, (
        "a run that went on after a change judged by this one"
    )
    assert judge_changed(evidence(judge_hash(), "another")) is not None
    assert judge_changed(evidence("")) is None
    assert judge_changed(Evidence()) is None


def test_it_is_exit_3_whatever_was_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    order = runner.RunRequest(run_id="one")
    opened = run.CampaignRun(order.directory, "dev", ())
    nothing_loads = Roster((), (Unloadable("k.py", "k.py", "no"),))
    monkeypatch.setattr(run, "roster", lambda files, shared: nothing_loads)
    assert len(opened.roster.failures) == 1, "a verdict: one file does not load"
    console = Console(record=True, width=200)
    assert runner._status(1, order, "", console) == runner.FAILED
    assert judge_changed(opened.evidence()) is None
    monkeypatch.setattr(judge_version, "judge_hash", lambda: "edited")
    assert runner._status(0, order, "", console) == runner.INFRASTRUCTURE
    assert "changed while the run judged" in console.export_text()
    assert judge_changed(opened.evidence()) is not None
