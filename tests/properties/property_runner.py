"""From verdicts to a failing test."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

import pytest
from hypothesis import strategies as st

from verify.campaign import halt
from verify.campaign.judge import Judge
from verify.campaign.targets import Target
from verify.evidence import Phase, Verdict
from verify.evidence.explanation import explain
from verify.evidence.known_failures import FILE
from verify.machine import settings
from verify.oracles import Group, groups
from verify.problem import Problem
from verify.problem.case import Case


class Guilty(AssertionError):  # noqa: N818 - a verdict
    """A failing verdict.  Each oracle raises a class of its own, so that shrinking does not slip
    from one to another."""


@cache
def _guilty(oracle: str) -> type[Guilty]:
    return type(f"Guilty_{oracle}", (Guilty,), {})


@dataclass
class _Search:
    """What one target's search has heard, what of it failed, and the seconds that searching and
    shrinking took.

    broken: the judge's own error, and on which case.
    """

    heard: set[str] = field(default_factory=set)
    failed: dict[str, list[Verdict]] = field(default_factory=dict)
    broken: tuple[str, Exception] | None = None
    seconds: dict[Phase, float] = field(default_factory=lambda: {"generate": 0.0, "shrink": 0.0})


_ONE_CASE = 1.0  # the most that one case of a search counts
_searches: defaultdict[str, _Search] = defaultdict(_Search)


def _budget(phase: Phase) -> float:
    """Seconds per target.  A kernel that compiles for seconds per shape gets fewer cases, not a
    longer campaign."""
    if phase == "generate":
        return settings.seconds("VERIFY_SEARCH_SECONDS", 15.0)
    return settings.seconds("VERIFY_SHRINK_SECONDS", 3.0 if halt.armed() else 15.0)


def unheard(tests: Iterable[object], known: Mapping[str, Group]) -> list[str]:
    """The groups that none of these tests judges: neither by its name nor by its family."""
    marks = [mark for test in tests for mark in getattr(test, "pytestmark", ())]
    names = {mark.args[0] for mark in marks if mark.name == "hears"}
    families = {mark.args[0] for mark in marks if mark.name == "hears_family"}
    return [
        group.name
        for group in known.values()
        if not (group.family in families if group.family else group.name in names)
    ]


def check_all_are_heard(tests: Iterable[object]) -> None:
    """Raise pytest.UsageError if an oracle's group reaches no property test: it would never be
    asked."""
    silent = unheard(tests, groups())
    if silent:
        raise pytest.UsageError(
            f"no property test judges {', '.join(silent)}: give the group a family that has one"
            " (exact, relations), or write a test with its marker in"
            " tests/properties/test_attention.py"
        )


def hold(judge: Judge, target: Target, source: st.DataObject | Problem | str) -> None:
    """Judge a drawn problem, a given one, or the case of an id; raise Guilty with the explanation
    of the first failing verdict.

    A case that failed once stays failed, whatever chance has in mind.  The search, and the search
    for a smaller case, end when their time is over (a hang costs a deadline at every step).
    """
    __tracebackhide__ = True
    if not isinstance(source, st.DataObject) and halt.over():
        return
    if isinstance(source, str):
        verdicts = judge.judge(target, Case.parse(source).problem, "witness")
        _convict(judge.guilty(verdicts))
        _still_fails(judge, source, verdicts)
        return
    if isinstance(source, Problem):
        _convict(judge.guilty(judge.judge(target, source)))
        return
    search = _searches[f"{target.id}-{groups()[target.group].family or target.group}"]
    problem = source.draw(target.problems, label="problem")
    case = f"{target.group}:{problem.name}"
    if case in search.failed:
        _convict(search.failed[case])
    # to be raised as it is: the same at every try, and never made smaller
    if search.broken is not None:
        if search.broken[0] == case:
            raise search.broken[1]
        return
    phase: Phase = "shrink" if search.failed else "generate"
    ended = halt.out_of_time() if phase == "shrink" else halt.over()
    if case in search.heard or search.seconds[phase] > _budget(phase) or ended:
        return  # Hypothesis repeats one draw in five
    begun = time.monotonic()
    try:
        verdicts = judge.judge(target, problem, phase)
    except Exception as error:
        search.broken = case, error
        raise
    search.heard.add(case)
    spent = time.monotonic() - begun
    # A case that waits for its build says nothing of the next ones, which find it made.
    search.seconds[phase] += spent if phase == "shrink" else min(spent, _ONE_CASE)
    guilty = judge.guilty(verdicts)
    if guilty:
        search.failed[case] = guilty
    _convict(guilty)


def _convict(guilty: list[Verdict]) -> None:
    __tracebackhide__ = True
    if guilty:
        halt.failed()
    for verdict in guilty:
        raise _guilty(verdict.oracle)(explain(verdict))


def _still_fails(judge: Judge, case: str, verdicts: list[Verdict]) -> None:
    """Raise AssertionError if that case is the witness of a known defect and holds: what it stands
    for may be mended."""
    __tracebackhide__ = True
    entry = judge.xfails.shown_by(case)
    if entry is not None and not any(verdict.outcome == "fail" for verdict in verdicts):
        raise AssertionError(f"{FILE}: {case} holds: strike its entry out ({entry.link})")
