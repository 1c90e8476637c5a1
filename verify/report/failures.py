"""The failing cases of a report, the smallest of each kind first."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from verify.evidence import Verdict, Verdicts
from verify.evidence.known_failures import Xfails
from verify.problem.case import replay_command
from verify.report.schema import (
    Failure,
)


def _failing(verdicts: Verdicts, known: Xfails) -> list[Failure]:
    """By config and oracle; what is known stands apart, for it would hide a larger case that is
    not."""
    grouped: dict[tuple[str, str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts.failing:
        entry = known.expecting(verdict)
        grouped[verdict.config, verdict.oracle, entry.told if entry else ""].append(verdict)
    return [_failure(found, told) for (_, _, told), found in sorted(grouped.items())]


def _failure(failing: Sequence[Verdict], known: str) -> Failure:
    verdict = min(failing, key=_size)
    finding = verdict.finding
    failure: Failure = {
        "variant": verdict.variant,
        "config": verdict.config,
        "oracle": verdict.oracle,
        "dtype": verdict.dtype,
        "cases": len(failing),
        "case": verdict.case,
        "problem": verdict.problem,
        "phase": verdict.phase,
        "message": finding.message if finding else "",
        "got": finding.got if finding else None,
        "bound": finding.bound if finding else None,
        "where": finding.where if finding else "",
        "count": finding.count if finding else 0,
        "total": finding.total if finding else 0,
        "replay": (finding.replay if finding else "") or replay_command(verdict.case),
    }
    if known:
        failure["known"] = known
    failure["shrunk"] = sum(not v.counted for v in failing)
    return failure


def _size(verdict: Verdict) -> tuple[float, int, str]:
    """Multiplications that the problem asks for, then how much there is to say about it."""
    from verify.problem import Problem, ProblemError

    try:
        problem = Problem.parse(verdict.problem)
        work = float(problem.pairs * (problem.head_dim + problem.head_dim_v))
    except ProblemError:
        work = math.inf
    return work, len(verdict.problem), verdict.case
