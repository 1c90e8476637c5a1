"""Numbers of a campaign: distributions, worst cases, timings.  NaN is worse than infinity, which is worse than any number."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

from verify.evidence import Verdict
from verify.report.schema import Distribution, Sample, Timing, WorstCase

# Powers of two, so that histograms of different reports compare: (-inf, 2^-10], ..., (1/2, 1], (1, 2], (2, inf).
EDGES_R = (-math.inf, *(2.0**e for e in range(-10, 2)), math.inf)
EDGES_ULP = (-math.inf, *(2.0**e for e in range(-2, 13)), math.inf)
EDGES_RATIO = (-math.inf, *(2.0**e for e in range(11)), math.inf)
EDGES = {"r_out": EDGES_R, "r_lse": EDGES_R, "lse_ulp": EDGES_ULP, "bound_ratio": EDGES_RATIO}

STEPS = ("generate", "run", "reference", "bound", "record")
MAX_SAMPLES = 200


def badness(value: float) -> tuple[bool, float]:
    """A sort key: NaN last."""
    return (True, 0.0) if math.isnan(value) else (False, value)


def quantile(ordered: Sequence[float], level: float) -> float:
    """The smallest member with at least `level` of the sample at or below it (the inverse of the empirical CDF)."""
    return ordered[max(math.ceil(level * len(ordered)) - 1, 0)]


def distribution(values: Iterable[float], edges: Sequence[float]) -> Distribution | None:
    """None for no values.  NaN counts in the last interval, so that the histogram adds up to `count`."""
    ordered = sorted(values, key=badness)
    if not ordered:
        return None
    histogram = [0] * (len(edges) - 1)
    for value in ordered:
        place = len(edges) - 1 if math.isnan(value) else bisect_left(edges, value)
        histogram[max(place - 1, 0)] += 1
    return {
        "count": len(ordered),
        "not_finite": sum(not math.isfinite(value) for value in ordered),
        "minimum": ordered[0],
        "median": quantile(ordered, 0.5),
        "p90": quantile(ordered, 0.9),
        "p99": quantile(ordered, 0.99),
        "maximum": ordered[-1],
        "edges": list(edges),
        "histogram": histogram,
    }


def spread(verdicts: Iterable[Verdict], measure: str) -> Distribution | None:
    """The distribution of one measure over the verdicts that have it."""
    return distribution((v.measures[measure] for v in verdicts if measure in v.measures), EDGES[measure])


def replay_command(case: str) -> str:
    """A line for a POSIX shell."""
    return "python -m verify replay '" + case.replace("'", "'\"'\"'") + "'"


def worst(verdicts: Iterable[Verdict], measure: str) -> WorstCase | None:
    """The verdict with the largest value of a measure, by the case's name among equals; None if no verdict has it."""
    having = [v for v in verdicts if measure in v.measures]
    if not having:
        return None
    top = max(badness(v.measures[measure]) for v in having)
    found = min((v for v in having if badness(v.measures[measure]) == top), key=lambda v: (v.case, v.oracle))
    return {
        "value": found.measures[measure],
        "r_out": found.measures.get("r_out"),
        "r_lse": found.measures.get("r_lse"),
        "case": found.case,
        "problem": found.problem,
        "config": found.config,
        "oracle": found.oracle,
        "replay": replay_command(found.case),
        "index": found.measures.get("worst_index"),
        "reference": found.measures.get("worst_reference"),
        "bound": found.measures.get("worst_bound"),
    }


def timings(verdicts: Iterable[Verdict]) -> dict[str, Timing]:
    """Seconds by step of judging: STEPS first, then whatever else was recorded."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for verdict in verdicts:  # the oracles of one case share its clock, which runs on: the last reading is the case's
        for step, seconds in verdict.seconds.items():
            found[step][verdict.case] = max(seconds, found[step].get(verdict.case, 0.0))
    return {step: _timing(sorted(found[step].values())) for step in sorted(found, key=lambda step: (_place(step), step))}


def _timing(ordered: list[float]) -> Timing:
    return {"median": quantile(ordered, 0.5), "maximum": ordered[-1], "total": math.fsum(ordered)}


def _place(step: str) -> int:
    return STEPS.index(step) if step in STEPS else len(STEPS)


def samples(verdicts: Sequence[Verdict]) -> list[Sample]:
    """Points for the plots: the worst by r and by error, and an even choice of the others, ordered by seqlen_kv."""
    having = [v for v in verdicts if "seqlen_kv" in v.measures and {"max_error", "r_out"} & v.measures.keys()]
    having.sort(key=lambda v: (v.measures["seqlen_kv"], v.case, v.oracle))
    if len(having) > MAX_SAMPLES:
        keep = {round(i * (len(having) - 1) / (MAX_SAMPLES - 3)) for i in range(MAX_SAMPLES - 2)}
        for measure in ("r_out", "max_error"):
            keep.add(max(range(len(having)), key=lambda i: (badness(having[i].measures.get(measure, -1.0)), -i)))
        having = [having[i] for i in sorted(keep)]
    return [
        {
            "seqlen_kv": v.measures["seqlen_kv"],
            "max_error": v.measures.get("max_error"),
            "error_bound": v.measures.get("error_bound"),
            "r_out": v.measures.get("r_out"),
        }
        for v in having
    ]
