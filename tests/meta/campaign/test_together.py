"""Cases judged beside each other keep their own verdicts, and what fails is found and shrunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from references.masks import Causal
from tests.harness.court import Court, court_of
from tests.harness.fake_trials import DECLARED, trial_of
from verify.campaign import together
from verify.campaign.targets import Target
from verify.campaign.together import prepare, siblings
from verify.evidence import Verdict
from verify.judging.stacked import shape_class
from verify.machine import settings
from verify.machine.settings import SIBLINGS, SettingError
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.tolerance import resolution

PROBLEM = Problem(
    heads_q=2, heads_kv=2, seqlen_q=11, seqlen_kv=40, head_dim=16, dtype="float16", seed=9
)
TARGET = Target(DECLARED, DECLARED.configs[0], "float16", "accuracy")
# Right but for large inputs, which make it wrong, or end its process.
KERNEL = """
import os

import torch


def attention(q, k, v):
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    out = torch.softmax(scores, -1) @ v.float()
    size = float(v.abs().max())
    if size > 30:
        os._exit(3)
    return (out * (1.25 if size > 4.5 else 1.0)).to(q.dtype)
"""


def test_siblings_differ_in_their_values_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert siblings(TARGET, PROBLEM) == []
    monkeypatch.setenv(SIBLINGS, "12")
    found = siblings(TARGET, PROBLEM)
    assert len({p.name for p in (PROBLEM, *found)}) == 13
    assert {shape_class(p) for p in found} == {shape_class(PROBLEM)}
    assert {p.seed % 8 for p in found} == {PROBLEM.seed % 8}
    assert len({p.distribution for p in (PROBLEM, *found)}) == min(13, len(ordinary()))
    assert found == siblings(TARGET, PROBLEM)
    assert siblings(replace(TARGET, group="counting"), PROBLEM) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"seqlen_kv": 1},
        {"softmax_scale": 0.0},
        {"softmax_scale": 2.0**-120},
        {"softmax_scale": -1e9},
    ],
    ids=["one key", "no scores", "equal scores", "one key of all"],
)
def test_a_problem_that_values_make_no_harder_has_none(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SIBLINGS, "3")
    assert len(siblings(TARGET, PROBLEM)) == 3
    assert siblings(TARGET, PROBLEM.but(**changes)) == []


def test_the_count_of_siblings_is_a_whole_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("-1", "1.5", "many", ""):
        monkeypatch.setenv(SIBLINGS, value)
        with pytest.raises(SettingError, match="a whole number of at least 0"):
            settings.check()
    monkeypatch.setenv(SIBLINGS, "31")
    settings.check()


def test_a_trial_takes_the_answers_to_its_own_questions_alone() -> None:
    trials = [trial_of(PROBLEM.but(seed=n, mask=Causal())) for n in (8, 16, 24)]
    assert prepare(trials) == trials
    asked, alone = trials[1], trial_of(trials[1].problem)
    assert asked.truth is asked.answers[0].truth
    assert torch.equal(asked.truth.out_bound, alone.truth.out_bound)
    other = replace(asked.arithmetic, output_roundings=2)
    assert torch.equal(asked.truth_of(other).out_bound, alone.truth_of(other).out_bound)
    assert asked.beside("another", PROBLEM).answers == []


def test_the_arithmetic_of_cases_that_ask_in_turn_is_resolved_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolved: list[str] = []
    make = resolution._resolved

    def counted(*asked: Any) -> Any:
        resolved.append(asked[2].name)
        return make(*asked)

    monkeypatch.setattr(resolution, "_resolved", counted)
    trials = [trial_of(PROBLEM.but(seed=n)) for n in range(32)]
    for _ in range(3):
        found = [trial.arithmetic for trial in trials]
    assert resolved == [trial.problem.plain_valued.name for trial in trials]
    assert found[0] == make(
        trials[0].declaration.numerics, trials[0].config, trials[0].problem, trials[0].arch
    )
    resolved.clear()
    beside = [trial_of(trials[0].problem.valued("sink", n)) for n in range(32)]
    assert {id(trial.arithmetic) for trial in beside} == {id(found[0])}
    assert resolved == [], "other values have the same arithmetic"
    for n in range(2 * resolution._MOST_RECENT):
        assert trial_of(PROBLEM.but(seed=100 + n)).arithmetic == found[0]
    assert len(resolution._RECENT) == resolution._MOST_RECENT


def test_what_cannot_be_prepared_is_left_to_its_own_case() -> None:
    trials = [trial_of(PROBLEM.but(distribution="no_such_values"))]
    trials += [trial_of(PROBLEM), trial_of(PROBLEM.but(seed=17))]
    assert prepare(trials) == trials[1:]
    assert [len(trial.answers) for trial in trials] == [0, 1, 1]


@pytest.fixture(scope="module")
def court(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Court]:
    with court_of(tmp_path_factory.mktemp("kernels"), large=KERNEL) as made:
        yield made


def outcomes(verdicts: list[Verdict]) -> list[tuple[str, str, str, dict[str, float]]]:
    return [(v.case, v.oracle, v.outcome, dict(v.measures)) for v in verdicts]


def test_each_case_has_the_verdicts_that_it_has_alone(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong one and the one that ends its process, too, and only these."""
    declaration = court.roster.declarations[0]
    target = Target(declaration, declaration.configs[0], "float16", "accuracy")
    problems = [PROBLEM.but(seed=n << 3) for n in range(1, 5)]
    problems.insert(1, PROBLEM.but(distribution="outliers"))
    problems.insert(3, PROBLEM.but(distribution="v_mean"))
    wrong = {1: "bound", 3: "execution"}
    asked = []
    stacks, compare, compared = together.answer, together.compare_together, []
    monkeypatch.setattr(together, "answer", lambda cases: asked.append(stacks(cases)))
    monkeypatch.setattr(
        together, "compare_together", lambda trials: compared.extend(compare(trials)) or compared
    )
    found = list(court.judge.judge_together(target, problems))
    assert asked == [6]
    # Those of one kind that were launched before the one that ends its process.
    assert [[trial.problem for trial in stack] for stack in compared] == [problems[0:3:2]]
    assert [[trial.number for trial in stack] for stack in compared] == [[0, 2]]
    for number, (problem, verdicts) in enumerate(zip(problems, found, strict=True)):
        failed = [v.oracle for v in verdicts if v.outcome == "fail"]
        assert failed[:1] == ([wrong[number]] if number in wrong else [])
        assert {v.problem for v in verdicts} == {problem.name}
        alone = court.judge.judge(target, problem)
        assert outcomes(verdicts) == outcomes(alone)
