"""Agenda: the few problems that fill every coverage bin of a docket, chosen among many that are drawn and not judged."""

from __future__ import annotations

from verify.court import Docket
from verify.coverage import bins_reachable, coverage_bins
from verify.draws import draws
from verify.problem import Problem

_ROUND = 300  # draws; a millisecond each
_ROUNDS = 5
_TELLING = 64  # keys


def agenda(docket: Docket) -> list[Problem]:
    """Problems that together fill every bin that the docket's support can reach, small ones preferred, in a stable order.

    A bin that none of the draws fills stays empty, and the report says so.
    """
    drawn: dict[str, Problem] = {}
    for number in range(_ROUNDS):
        for problem in draws(docket.problems, _ROUND * (number + 1)):
            drawn.setdefault(problem.name, problem)
        chosen, missing = _cover(docket, list(drawn.values()))
        if not missing:
            break
    return chosen


def _telling(problem: Problem) -> bool:
    """Whether rows weigh several blocks' worth of keys against each other: one key alone is right in most wrong kernels."""
    return problem.seqlen_kv > _TELLING and problem.seqlen_q > 1


def _cover(docket: Docket, problems: list[Problem]) -> tuple[list[Problem], set[str]]:
    """A greedy cover: the problem that fills most of what is missing; if two are equal the telling one, then the cheaper."""
    missing = bins_reachable(docket.declaration.support, docket.config)
    bins = [coverage_bins(problem, docket.config) for problem in problems]
    chosen: list[Problem] = []
    while missing:
        gain = [(len(bins[i] & missing), _telling(problem), -problem.pairs) for i, problem in enumerate(problems)]
        best = max(range(len(problems)), key=gain.__getitem__, default=None)
        if best is None or not bins[best] & missing:
            break
        chosen.append(problems[best])
        missing = missing - bins[best]
    return chosen, missing
