"""Draws: what a strategy gives when nothing is judged, to choose from."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from verify.problem import Problem


def draws(strategy: SearchStrategy[Problem], count: int, number: int = 0) -> list[Problem]:
    """Up to `count` problems in the order in which they are drawn, repeats included; other ones for
    another number.

    Neither chance, the machine nor a database has a say: the same arguments always give the same
    problems.
    """
    found: list[Problem] = []

    @seed(number)  # derandomize would make the draws depend on the text of this function
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(problem: Problem) -> None:
        found.append(problem)

    collect()
    return found
