"""The ledger of launches: written in a process, read in another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from verify.cuda import compile as cuda
from verify.sanitizers import ledger
from verify.sanitizers.facts import CaseResult, Facts, judge
from verify.sanitizers.ledger import Launched
from verify.sanitizers.records import Summary


def test_every_launch_is_in_the_ledger_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = pytest.importorskip("triton.knobs")
    done: list[object] = []
    path = tmp_path / "launches.jsonl"
    monkeypatch.setenv(ledger.VARIABLE, str(path))
    monkeypatch.setattr(cuda, "launch", lambda *arguments: done.append(arguments))
    hooks = type(knobs.runtime.launch_enter_hook)()
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", hooks)
    ledger.watch()
    ledger.begin_run()
    cuda.launch(SimpleNamespace(entry="split_q"), (1,), (128,), 0, 1, 2)  # type: ignore[arg-type]
    ledger.begin_run()
    hooks(SimpleNamespace(get=lambda: {"name": "flash"}))
    assert len(done) == 1
    first, second = ledger.read(path) or ()
    assert [launched.kernel for launched in (*first, *second)] == ["split_q", "flash"]
    assert f"{__file__}:" in first[0].frame
    assert first[0].frame.endswith("in test_every_launch_is_in_the_ledger_of_its_run")
    assert ledger.frame_of("the kernel split_q", (first, second)) == first[0].frame
    assert ledger.frame_of("inlined", (first, second)) == second[0].frame
    assert ledger.frame_of("inlined", None) == ""


def test_a_ledger_that_is_no_ledger_is_none(tmp_path: Path) -> None:
    path = tmp_path / "launches.jsonl"
    assert ledger.read(path) is None
    for text in ("{", '{"kernel": "before any run", "frame": ""}', '{"run": true}\n{"other": 1}'):
        path.write_text(text)
        assert ledger.read(path) is None


LAUNCHED = (Launched("split_q", "family.py:3 in forward"),)
FACTS = Facts(
    tool="memcheck",
    exit_code=0,
    summary=Summary(0),
    records=(),
    results=(CaseResult("a", "ok"), CaseResult("b", "ok")),
    expected_cases=2,
    launches=(LAUNCHED, LAUNCHED),
    counted=True,
)


def test_a_run_without_a_launch_makes_a_clean_process_inconclusive() -> None:
    assert judge(FACTS).outcome == "clean"
    for launches, says in (
        (None, "no readable ledger"),
        ((LAUNCHED, ()), "run 2 of 2 launched no kernel"),
        ((LAUNCHED,), "1 runs in the ledger, 2 cases run"),
    ):
        judgement = judge(replace(FACTS, launches=launches))
        assert judgement.outcome == "inconclusive"
        assert says in "; ".join(judgement.reasons)
        assert judge(replace(FACTS, launches=launches, counted=False)).outcome == "clean"
