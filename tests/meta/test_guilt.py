"""From verdicts to failing tests: what a search raises, and that it is what happened."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.meta.direct import declared
from tests.properties.guilt import Guilty, hold
from verify.court import Court, Docket
from verify.evidence import Finding, Phase, Verdict
from verify.problem import Problem


class Bench:
    """A court of which each long problem is guilty, or that breaks on it."""

    def __init__(self, breaks: bool) -> None:
        self.breaks, self.heard = breaks, list[Problem]()

    def hear(self, docket: Docket, problem: Problem, phase: Phase = "generate") -> list[Verdict]:
        self.heard.append(problem)
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
    docket = Docket(declaration, declaration.configs[0], dtype, "accuracy")

    @settings(max_examples=60, database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def holds(data: st.DataObject) -> None:
        hold(cast(Court, bench), docket, data)

    holds()


def test_a_guilty_verdict_is_shrunk() -> None:
    bench = Bench(breaks=False)
    with pytest.raises(Guilty, match="too long"):
        search(bench, "float16")
    assert min(len(problem.name) for problem in bench.heard if problem.seqlen_kv > 4) < 40


def test_an_error_of_the_judge_is_raised_as_it_is_and_not_shrunk() -> None:
    bench = Bench(breaks=True)
    with pytest.raises(ZeroDivisionError, match="the judge's own"):
        search(bench, "bfloat16")
    assert sum(problem.seqlen_kv > 4 for problem in bench.heard) == 1
