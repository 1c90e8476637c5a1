"""From verdicts to a failing test."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest
from hypothesis import strategies as st

from verify.campaign import halt, search_scope
from verify.campaign.edge_cases import first_cases
from verify.campaign.judge import Judge
from verify.campaign.targets import Target
from verify.campaign.together import like, siblings
from verify.evidence import Phase, Verdict
from verify.evidence.explanation import explain
from verify.evidence.known_failures import FILE
from verify.machine import settings
from verify.oracles import Group, groups, of_group
from verify.problem import Problem
from verify.problem.case import Case


class Convicted(AssertionError):  # noqa: N818 - a verdict
    """A failing verdict.  Each oracle raises a class of its own, so that shrinking does not slip
    from one to another."""


@cache
def _convicted(oracle: str) -> type[Convicted]:
    return type(f"Convicted_{oracle}", (Convicted,), {})


@dataclass
class _Search:
    """The search of one target: the cases judged, those that failed, and the seconds that searching
    and shrinking took.

    broken: the case on which the judge's own code failed, and its error.  values: the distribution
    and seed of a sibling that failed, which shrinking keeps.
    """

    judged: set[str] = field(default_factory=set)
    failed: dict[str, list[Verdict]] = field(default_factory=dict)
    broken: tuple[str, Exception] | None = None
    values: tuple[str, int] | None = None
    seconds: dict[Phase, float] = field(default_factory=lambda: {"generate": 0.0, "shrink": 0.0})


_ONE_CASE = 1.0  # the most that one case of a search counts


class _Searches(defaultdict[str, _Search]):
    """Searches by target, of one lease: another one begins anew."""

    def __init__(self) -> None:
        super().__init__(_Search)
        self.lease = ""

    def of(self, target: Target) -> _Search:
        if self.lease != search_scope.current():
            self.clear()
            self.lease = search_scope.current()
        return self[f"{target.id}-{groups()[target.group].family or target.group}"]


_searches = _Searches()


def _budget(phase: Phase) -> float:
    """Seconds per target: a kernel that compiles for seconds per shape gets fewer cases, not a
    longer campaign."""
    if phase == "generate":
        return settings.seconds("VERIFY_SEARCH_SECONDS", 15.0)
    return settings.seconds("VERIFY_SHRINK_SECONDS", 3.0 if halt.armed() else 15.0)


def unasked(tests: Iterable[object], known: Mapping[str, Group]) -> list[str]:
    """The groups that none of these tests judges: neither by its name nor by its family."""
    marks = [mark for test in tests for mark in getattr(test, "pytestmark", ())]
    names = {mark.args[0] for mark in marks if mark.name == "targets_of"}
    families = {mark.args[0] for mark in marks if mark.name == "family_targets"}
    return [
        group.name
        for group in known.values()
        if not (group.family in families if group.family else group.name in names)
    ]


def check_all_are_asked(tests: Iterable[object]) -> None:
    """Raise pytest.UsageError if no property test covers an oracle's group: it would never be
    asked."""
    missing = unasked(tests, groups())
    if missing:
        raise pytest.UsageError(
            f"no property test judges {', '.join(missing)}: give the group a family that has one"
            " (exact, relations), or write a test with its marker in"
            " tests/properties/test_attention.py"
        )


def hold(
    judge: Judge,
    target: Target,
    source: st.DataObject | Problem | str,
    among: Sequence[Target] = (),
) -> None:
    """Judge a drawn problem, a given one, or a case id.

    among: all targets from which the test draws one; () if it has one.

    Raises Convicted with the explanation of the first failing verdict.  A case that failed once
    counts as failed from then on, even if it would pass now.  The search, and the shrinking after
    it, end when their time is over (a hang costs a deadline at every step): the search by
    halt.SearchOver, the shrinking by halt.ShrinkingOver.
    """
    __tracebackhide__ = True
    if not isinstance(source, st.DataObject) and halt.over():
        return
    if isinstance(source, str):
        verdicts = judge.judge(target, Case.parse(source).problem, "witness")
        _convict(judge.unexpected_failures(verdicts))
        _still_fails(judge, source, verdicts)
        return
    if isinstance(source, Problem):
        _convict(judge.unexpected_failures(judge.judge(target, source)))
        return
    search = _searches.of(target)
    problem = source.draw(target.problems, label="problem")
    # after the draw: Hypothesis wants each example to draw as much as those before it
    if _over([_searches.of(each) for each in among or (target,)]):
        raise halt.SearchOver
    case = f"{target.group}:{problem.name}"
    if case in search.failed:
        _convict(search.failed[case])
    # to be raised as it is: the same at every try, and never made smaller
    if search.broken is not None:
        if search.broken[0] == case:
            raise search.broken[1]
        raise halt.ShrinkingOver(search.broken[1])
    phase: Phase = "shrink" if search.failed else "generate"
    ended = search.seconds[phase] > _budget(phase) or _ended(phase)
    if ended and phase == "shrink":
        raise halt.ShrinkingOver(_conviction(_smallest(search)))
    if case in search.judged or ended:
        return  # Hypothesis repeats one draw in five
    begun = time.monotonic()
    try:
        judged, failing = _judged(judge, target, problem, phase, search)
    except Exception as error:
        search.broken = case, error
        raise
    search.judged.add(case)
    spent = time.monotonic() - begun
    # A case that waits for its build says nothing of the next ones, which find it made.
    search.seconds[phase] += spent if phase == "shrink" else min(spent, judged * _ONE_CASE)
    if failing:
        search.failed[case] = failing
    _convict(failing)


def _smallest(search: _Search) -> list[Verdict]:
    """The failing verdicts of the last case that the oracle of the first one convicted: shrinking
    tries smaller and smaller ones."""
    oracle = next(iter(search.failed.values()))[0].oracle
    return next(each for each in reversed(search.failed.values()) if each[0].oracle == oracle)


def _ended(phase: Phase) -> bool:
    """Whether the campaign judges no further case of this phase."""
    if phase == "shrink":
        return halt.out_of_time() or not search_scope.shrinks()
    return halt.over()


def _over(searches: Sequence[_Search]) -> bool:
    """Whether nothing more is searched for.  What failed is made smaller, and raised again."""
    if any(search.failed or search.broken is not None for search in searches):
        return False
    budget = _budget("generate")
    return halt.over() or all(search.seconds["generate"] > budget for search in searches)


def _judged(
    judge: Judge, target: Target, problem: Problem, phase: Phase, search: _Search
) -> tuple[int, list[Verdict]]:
    """Judge a problem, then its siblings, or the one like that which failed; stop at a failure.

    Returns how many were judged, and the failing verdicts of the last one.
    """
    if phase == "generate":
        others = siblings(target, problem)
    else:
        others = [] if search.values is None else like(target, problem, search.values)
    problems = [problem, *others]
    with contextlib.closing(judge.judge_together(target, problems, phase)) as verdicts:
        for number, found in enumerate(verdicts, 1):
            failing = judge.unexpected_failures(found)
            if failing:
                own = problems[number - 1]
                search.values = (own.distribution, own.seed) if number > 1 else search.values
                return number, failing
            if halt.over():
                return number, []
    return len(problems), []


def hold_first(judge: Judge, target: Target) -> None:
    """Judge one case of a target at least: the first of `first_cases` that its oracles can judge.

    Raises Convicted as `hold` does.
    """
    __tracebackhide__ = True
    asked = {oracle.name for oracle in of_group(target.group)}
    for problem in first_cases(target):
        if halt.over():
            return
        verdicts = judge.judge(target, problem)
        _convict(judge.unexpected_failures(verdicts))
        if any(each.oracle in asked and each.outcome != "inapplicable" for each in verdicts):
            return


def _convict(failing: list[Verdict]) -> None:
    __tracebackhide__ = True
    if failing:
        halt.failed()
        raise _conviction(failing)


def _conviction(failing: list[Verdict]) -> Convicted:
    return _convicted(failing[0].oracle)(explain(failing[0]))


def _still_fails(judge: Judge, case: str, verdicts: list[Verdict]) -> None:
    """Raise AssertionError if that case is the witness of a known defect and holds: what it stands
    for may be mended."""
    __tracebackhide__ = True
    entry = judge.xfails.shown_by(case)
    if entry is not None and not any(verdict.outcome == "fail" for verdict in verdicts):
        raise AssertionError(f"{FILE}: {case} holds: strike its entry out ({entry.link})")
