"""From verdicts to failing tests: a search raises the failure that it found."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from datetime import date
from pathlib import Path
from typing import cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.vendor.pretty import pretty
from msgspec.structs import replace

from references.output_scale import DTYPES as EIGHT_BITS
from tests.harness.in_process import declared
from tests.properties import property_runner, test_attention
from tests.properties.property_runner import Convicted, hold, hold_first
from verify.campaign import halt
from verify.campaign.edge_cases import first_cases
from verify.campaign.judge import Judge
from verify.campaign.targets import Target
from verify.evidence import Finding, Outcome, Phase, Recorder, Verdict
from verify.evidence.known_failures import Xfail, Xfails
from verify.machine.settings import SIBLINGS
from verify.oracles import Group, grouped, groups
from verify.problem import Problem
from verify.variant import Config


@pytest.fixture(autouse=True)
def new_searches() -> None:
    property_runner._searches.clear()


class Bench:
    """A judge that convicts every long problem, or that breaks on it."""

    unexpected_failures = Judge.unexpected_failures

    def judge_together(
        self, target: Target, problems: Sequence[Problem], phase: Phase
    ) -> Generator[list[Verdict], None, None]:
        return (self.judge(target, problem, phase) for problem in problems)

    def __init__(self, breaks: bool, xfails: Xfails | None = None) -> None:
        self.breaks, self.judged = breaks, list[Problem]()
        self.xfails, self.met = xfails or Xfails(), list[Xfail]()

    def judge(self, target: Target, problem: Problem, phase: Phase = "generate") -> list[Verdict]:
        self.judged.append(problem)
        long = problem.seqlen_kv > 4
        if long and self.breaks:
            raise ZeroDivisionError("the judge's own")
        return [
            Verdict(
                case=f"direct:default:accuracy:{problem.name}",
                variant="direct",
                config="default",
                dtype=problem.dtype,
                oracle="bound",
                group="accuracy",
                outcome="fail" if long else "pass",
                phase=phase,
                problem=problem.name,
                finding=Finding(oracle="bound", message="too long") if long else None,
            )
        ]


def search(bench: Bench, dtype: str) -> None:
    declaration = declared()
    target = Target(declaration, declaration.configs[0], dtype, "accuracy")

    @settings(
        max_examples=60,
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def holds(data: st.DataObject) -> None:
        hold(cast(Judge, bench), target, data)

    try:
        holds()
    except halt.ShrinkingOver as end:  # as conftest.py does
        raise end.failure from None


def test_a_failing_verdict_is_shrunk() -> None:
    bench = Bench(breaks=False)
    with pytest.raises(Convicted, match="too long"):
        search(bench, "float16")
    assert min(len(problem.name) for problem in bench.judged if problem.seqlen_kv > 4) < 40


@pytest.mark.parametrize("count", [0, 5])
def test_a_failing_sibling_is_found_and_shrunk(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a fault that few values show, which few draws have."""

    class Rare(Bench):
        def judge(
            self, target: Target, problem: Problem, phase: Phase = "generate"
        ) -> list[Verdict]:
            shown = problem if problem.seed >> 3 & 5 == 5 else problem.but(seqlen_kv=1, seqlen_q=1)
            found = super().judge(target, shown, phase)
            self.judged[-1] = problem
            return found

    monkeypatch.setenv(SIBLINGS, str(count))
    bench = Rare(breaks=False)
    with pytest.raises(Convicted, match="too long"):
        search(bench, "float16")
    failing = [p for p in bench.judged if p.seqlen_kv > 4 and p.seed >> 3 & 5 == 5]
    assert min(len(p.name) for p in failing) < 70
    if count:  # found among the siblings of the first problem that is long enough
        assert sum(p.seqlen_kv > 4 for p in bench.judged[: bench.judged.index(failing[0])]) <= 5
        assert len({(p.distribution, p.seed) for p in failing}) <= 3


class Timed(Bench):
    """A judge whose campaign is out of time after so many cases."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cases: int, convicts: bool) -> None:
        super().__init__(breaks=False)
        self.monkeypatch, self.cases, self.convicts = monkeypatch, cases, convicts

    def judge(self, target: Target, problem: Problem, phase: Phase = "generate") -> list[Verdict]:
        if len(self.judged) + 1 == self.cases:
            self.monkeypatch.setenv(halt.UNTIL, "0")
        if not self.convicts:
            problem = problem.but(seqlen_q=1, seqlen_kv=1)
        return super().judge(target, problem, phase)


def test_a_search_ends_with_the_campaigns_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis would draw all its examples."""
    bench = Timed(monkeypatch, cases=5, convicts=False)
    with pytest.raises(halt.SearchOver):
        search(bench, "float16")
    assert len(bench.judged) == 5


def test_a_search_ends_with_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERIFY_SEARCH_SECONDS", "0")
    bench = Timed(monkeypatch, cases=-1, convicts=False)
    with pytest.raises(halt.SearchOver):
        search(bench, "float16")
    assert len(bench.judged) == 1


def test_what_failed_is_raised_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Timed(monkeypatch, cases=1, convicts=True)
    while bench.cases < 100:  # until the case that ends the time is the first long one
        bench.judged.clear()
        monkeypatch.delenv(halt.UNTIL, raising=False)
        property_runner._searches.clear()
        try:
            search(bench, "float16")
        except halt.SearchOver:
            bench.cases += 1
        except Convicted:
            break
    assert bench.judged[bench.cases - 1].seqlen_kv > 4
    assert all(problem.seqlen_kv <= 4 for problem in bench.judged[: bench.cases - 1])


def test_shrinking_ends_with_its_time_and_raises_the_smallest_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hypothesis would draw hundreds of candidates that nothing judges."""

    class Timely(Bench):
        """Its ninth case takes all time that there is for making a failing one smaller."""

        def judge(
            self, target: Target, problem: Problem, phase: Phase = "generate"
        ) -> list[Verdict]:
            (verdict,) = super().judge(target, problem, phase)
            shrunk.append(phase == "shrink")
            if sum(shrunk) == 9:
                monkeypatch.setenv("VERIFY_SHRINK_SECONDS", "0")
            if verdict.finding is None:
                return [verdict]
            failed.append(problem.name)
            named = dataclasses.replace(verdict.finding, message=problem.name)
            return [dataclasses.replace(verdict, finding=named)]

    shrunk, failed, drawn = list[bool](), list[str](), list[str]()
    bench = Timely(breaks=False)
    declaration = declared()
    target = Target(declaration, declaration.configs[0], "float16", "accuracy")

    @settings(max_examples=60, database=None, derandomize=True, deadline=None)
    @given(data=st.data())
    def holds(data: st.DataObject) -> None:
        drawn.append("")
        hold(cast(Judge, bench), target, data)

    with pytest.raises(halt.ShrinkingOver) as end:
        holds()
    assert isinstance(end.value.failure, Convicted)
    assert failed[-1] in str(end.value.failure)
    assert sum(shrunk) == 9
    assert len(failed) > 1, "it was made smaller"
    assert len(drawn) < 3 * len(bench.judged)


def test_one_of_several_targets_that_failed_keeps_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is made smaller while the time of the others is over."""
    monkeypatch.setenv("VERIFY_SEARCH_SECONDS", "60")
    declaration = declared()
    config = declaration.configs[0]
    wrong = Target(declaration, config, "float16", "accuracy")
    right = Target(declaration, config, "bfloat16", "accuracy")

    class OneWrong(Bench):
        def judge(
            self, target: Target, problem: Problem, phase: Phase = "generate"
        ) -> list[Verdict]:
            ours = problem if target is wrong else problem.but(seqlen_q=1, seqlen_kv=1)
            return super().judge(target, ours, phase)

    bench = OneWrong(breaks=False)
    property_runner._searches.of(right).seconds["generate"] = 61.0

    @settings(max_examples=200, database=None, derandomize=True, deadline=None)
    @given(data=st.data())
    def holds(data: st.DataObject) -> None:
        own = data.draw(st.sampled_from([right, wrong]))
        hold(cast(Judge, bench), own, data, (right, wrong))

    with pytest.raises(Convicted):
        holds()


def test_an_error_of_the_judge_is_raised_as_it_is_and_not_shrunk() -> None:
    bench = Bench(breaks=True)
    with pytest.raises(ZeroDivisionError, match="the judge's own"):
        search(bench, "bfloat16")
    assert sum(problem.seqlen_kv > 4 for problem in bench.judged) == 1


WITNESS = "direct:default:accuracy:sq=2,skv=5,d=16,dtype=float32"
KNOWN = Xfail(cases="direct:.*", link="elsewhere", expires=date(2100, 1, 1), witness=WITNESS)


def test_each_group_of_a_family_is_asked_once() -> None:
    """A case that no oracle of the group judges is followed by another, and no other is."""

    class Shy(Bench):
        def judge(
            self, target: Target, problem: Problem, phase: Phase = "generate"
        ) -> list[Verdict]:
            self.judged.append(problem)
            outcome: Outcome = "pass" if len(self.judged) >= self.asked else "inapplicable"
            made = super().judge(target, problem.but(seqlen_kv=1, seqlen_q=1), phase)
            self.judged.pop()
            return [dataclasses.replace(made[0], oracle="key_shift", outcome=outcome)]

        asked = 1

    target = Target(declared(dtypes_out=EIGHT_BITS), declared().configs[0], "float16", "key_shift")
    for asked, judged in ((1, 1), (2, 2), (9, 3)):
        bench = Shy(breaks=False)
        bench.asked = asked
        hold_first(cast(Judge, bench), target)
        assert len(bench.judged) == judged
        assert all(p.distribution == "small_integers" and p.pairs > 16 for p in bench.judged)
    assert first_cases(target)[0].scaled_output is None


@pytest.mark.for_ci
def test_a_group_that_no_draw_fits_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "fitted", lambda target, problem: None)
    bench = Bench(breaks=True)
    target = Target(declared(), declared().configs[0], "float16", "key_permutation")
    hold_first(cast(Judge, bench), target)
    assert first_cases(target) == bench.judged == []


def test_the_first_case_of_a_group_can_fail() -> None:
    target = Target(declared(), declared().configs[0], "float16", "accuracy")
    with pytest.raises(Convicted, match="too long"):
        hold_first(cast(Judge, Bench(breaks=False)), target)


def test_a_known_defect_is_met_and_not_shrunk() -> None:
    bench = Bench(breaks=False, xfails=Xfails((KNOWN,)))
    search(bench, "float32")
    long = [problem for problem in bench.judged if problem.seqlen_kv > 4]
    assert bench.met == [KNOWN] * len(long)
    assert len(long) > 10


def test_another_oracle_than_the_known_one_convicts() -> None:
    bench = Bench(breaks=False, xfails=Xfails((replace(KNOWN, oracles=("repeat",)),)))
    target = Target(declared(), declared().configs[0], "float32", "accuracy")
    with pytest.raises(Convicted, match="too long"):
        hold(
            cast(Judge, bench),
            target,
            Problem(seqlen_q=2, seqlen_kv=5, head_dim=16, dtype="float32"),
        )
    assert bench.met == []


def test_a_known_defect_that_is_mended_is_told() -> None:
    target = Target(declared(), declared().configs[0], "float32", "accuracy")
    bench = Bench(breaks=False, xfails=Xfails((KNOWN,)))
    hold(cast(Judge, bench), target, WITNESS)
    fixed = replace(KNOWN, witness=WITNESS.replace("skv=5", "skv=3"))
    bench = Bench(breaks=False, xfails=Xfails((fixed,)))
    with pytest.raises(
        AssertionError, match=r"xfails.toml: .*skv=3.* holds: strike its entry out \(elsewhere\)"
    ):
        hold(cast(Judge, bench), target, fixed.witness)


def test_a_group_that_no_test_judges_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    @pytest.mark.targets_of("accuracy")
    def by_name() -> None: ...

    @pytest.mark.family_targets("exact")
    def by_family() -> None: ...

    tests = [by_name, by_family]
    known = grouped(
        [
            Group(name="accuracy", about="judged by its name"),
            Group(name="mine", about="judged by its family", family="exact"),
            Group(name="silent", about="judged by no test"),
            Group(name="lost", about="of a family without a test", family="missing"),
        ]
    )
    assert property_runner.unasked(tests, known) == ["silent", "lost"]
    assert property_runner.unasked(vars(test_attention).values(), groups()) == []
    monkeypatch.setattr(property_runner, "groups", lambda: known)
    with pytest.raises(
        pytest.UsageError, match=r"no property test judges silent, lost: give the group"
    ):
        property_runner.check_all_are_asked(tests)


def test_what_hypothesis_prints_of_a_failing_test_is_short(tmp_path: Path) -> None:
    """Hypothesis warns of long arguments; as an error, that warning would replace the verdict."""
    target = Target(declared(), Config(), "float32", "accuracy")
    xfails = Xfails(tuple(KNOWN for _ in range(1000)))
    assert "accuracy" in pretty(target)
    assert len(pretty(target)) < 200
    with Recorder(tmp_path, "one") as recorder:
        judge = Judge(recorder, xfails=xfails)
        assert len(pretty(judge)) < 200
        judge.close()
