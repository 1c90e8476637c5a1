"""Backwards that are judged beside each other: few messages, stacked gradients, the verdicts that
each case has alone, and no case that is begun and not judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from verify.bundle import ROOT
from verify.campaign import together
from verify.campaign.judge import Judge
from verify.campaign.targets import Target
from verify.cell.discovery import roster
from verify.cell.process import Cell
from verify.evidence import Recorder, Verdict, load
from verify.problem import Problem

PROBLEM = Problem(
    heads_q=2, heads_kv=2, seqlen_q=11, seqlen_kv=40, head_dim=16, dtype="float32", seed=0
)
_CLOSE = 1e-9  # of a measure, which is made of fp64 numbers in another order


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=("math.py", "math_backward.py", "cpu_flash_backward.py"))
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Judge, Target]]:
    judge = Judge(Recorder(tmp_path, "main"))
    try:
        declaration = roster([ROOT / "kernels" / "torch" / request.param]).declarations[0]
        group = "gradients" if "backward" in declaration.entries else "accuracy"
        dtype = declaration.support.dtypes[0]
        yield judge, Target(declaration, declaration.configs[0], dtype, group)
    finally:
        judge.close()


def problems_of(target: Target) -> list[Problem]:
    """Of one shape."""
    found = [PROBLEM.but(dtype=target.dtype, seed=n << 3) for n in range(1, 4)]
    return [*found, found[0].but(distribution="large_logits")]


def differences(mine: Verdict, other: Verdict) -> Iterator[str]:
    """What two verdicts on one case do not share, beyond the roundings of measures."""
    if (mine.case, mine.oracle, mine.outcome) != (other.case, other.oracle, other.outcome):
        yield f"{mine.case} {mine.oracle}: {mine.outcome}, {other.outcome}"
    if mine.measures.keys() != other.measures.keys():
        yield f"{mine.case} {mine.oracle}: {mine.measures.keys() ^ other.measures.keys()}"
    for name in mine.measures.keys() & other.measures.keys():
        if mine.measures[name] != pytest.approx(other.measures[name], rel=_CLOSE, nan_ok=True):
            yield f"{mine.case} {mine.oracle} {name}: {mine.measures[name]} {other.measures[name]}"


def test_each_case_has_the_verdicts_that_it_has_alone(
    opened: tuple[Judge, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, target = opened
    backward = target.group == "gradients"
    messages: Counter[str] = Counter()
    asked, stacks = Cell._ask, list[int]()
    answer = together.stacked_gradients.answer

    def counted(cell: Cell, message: dict[str, Any], *rest: Any, **more: Any) -> Any:
        messages[message["op"]] += 1
        return asked(cell, message, *rest, **more)

    problems = problems_of(target)
    judge.judge(target, problems[0].but(seed=80))  # what the first launch of a process loads
    monkeypatch.setattr(Cell, "_ask", counted)
    monkeypatch.setattr(
        together.stacked_gradients, "answer", lambda cases: stacks.append(answer(cases))
    )
    found = list(judge.judge_together(target, problems))
    declared = target.declaration.gradients
    saves = declared is not None and declared.softmax.source != "own"
    assert messages["several"] == 1 + saves  # what forwards save, then the launches on trial
    assert messages["run"] == len(problems)  # each with inputs that cannot be written
    assert stacks == [len(problems) if backward else 0]
    alone = [judge.judge(target, problem) for problem in problems]
    pairs = [pair for both in zip(found, alone, strict=True) for pair in zip(*both, strict=True)]
    assert [text for mine, other in pairs for text in differences(mine, other)] == []
    assert "fail" not in {mine.outcome for mine, _ in pairs}
    assert len({mine.case for mine, _ in pairs}) == len(problems)


def test_what_was_begun_is_judged_when_its_caller_stops(
    opened: tuple[Judge, Target], tmp_path: Path
) -> None:
    judge, target = opened
    problems = problems_of(target)
    judging = judge.judge_together(target, problems)
    next(judging)
    begun = load(tmp_path)
    assert len(begun.lost) == len(problems) - 1
    judging.close()
    assert not load(tmp_path).lost
    assert {v.problem for v in load(tmp_path).verdicts} == {p.name for p in problems}
