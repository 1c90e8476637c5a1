"""Numbers of a campaign: distributions, worst cases, timings.  NaN is worse than infinity, which is
worse than any number."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

from verify.brief import short
from verify.evidence import Verdict
from verify.report import replays
from verify.report.schema import TENSORS, Distribution, Sample, TensorReport, Timing, WorstCase

# Powers of two, so that histograms of different reports compare: (-inf, 2^-10], ..., (1/2, 1], (1,
# 2], (2, inf).
EDGES_R = (-math.inf, *(2.0**e for e in range(-10, 2)), math.inf)
EDGES_ULP = (-math.inf, *(2.0**e for e in range(-2, 13)), math.inf)
EDGES_RATIO = (-math.inf, *(2.0**e for e in range(11)), math.inf)
EDGES = {
    **{f"r_{name}": EDGES_R for name in TENSORS},
    "lse_ulp": EDGES_ULP,
    "bound_ratio": EDGES_RATIO,
}

STEPS = ("generate", "run", "reference", "bound", "record")
PLOTTED = tuple(name for name in TENSORS if name != "lse")
MAX_SAMPLES = 16  # of one tensor: more make a page large, and a plot no clearer


def badness(value: float) -> tuple[bool, float]:
    """A sort key: NaN last."""
    return (True, 0.0) if math.isnan(value) else (False, value)


def quantile(ordered: Sequence[float], level: float) -> float:
    """The smallest member with at least `level` of the sample at or below it (the inverse of the
    empirical CDF)."""
    return ordered[max(math.ceil(level * len(ordered)) - 1, 0)]


def distribution(values: Iterable[float], edges: Sequence[float]) -> Distribution | None:
    """None for no values.  NaN counts in the last interval, so that the histogram adds up to
    `count`."""
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
        "histogram": histogram,
    }


def spread(verdicts: Iterable[Verdict], measure: str) -> Distribution | None:
    """The distribution of one measure over the verdicts that have it."""
    return distribution(
        (v.measures[measure] for v in verdicts if measure in v.measures), EDGES[measure]
    )


def tensors(verdicts: Sequence[Verdict]) -> dict[str, TensorReport]:
    """By name, in the order of TENSORS: every tensor of which some verdict has an r."""
    spreads = {name: spread(verdicts, f"r_{name}") for name in TENSORS}
    return {
        name: {"worst": _worst(verdicts, name), "r": found}
        for name, found in spreads.items()
        if found is not None
    }


def _worst(verdicts: Iterable[Verdict], tensor: str) -> WorstCase:
    """The verdict with the largest r of a tensor, by the case's name among equals."""
    having = [v for v in verdicts if f"r_{tensor}" in v.measures]
    top = max(badness(v.measures[f"r_{tensor}"]) for v in having)
    found = min(
        (v for v in having if badness(v.measures[f"r_{tensor}"]) == top),
        key=lambda v: (v.case, v.oracle),
    )
    index = found.measures.get(f"worst_index_{tensor}")
    worst: WorstCase = {
        "tensor": tensor,
        "r": found.measures[f"r_{tensor}"],
        "case": found.case,
        "config": found.config,
        "oracle": found.oracle,
        "index": None if index is None else int(index),
        "reference": found.measures.get(f"worst_reference_{tensor}"),
        "bound": found.measures.get(f"worst_bound_{tensor}"),
    }
    if replay := replays.unusual(found.case):
        worst["replay"] = replay
    return worst


def largest(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """The largest r of each tensor of which some verdict has one, in the order of TENSORS."""
    found = {name: [v.measures.get(f"r_{name}") for v in verdicts] for name in TENSORS}
    having = {name: [r for r in each if r is not None] for name, each in found.items()}
    return {name: max(each, key=badness) for name, each in having.items() if each}


def timings(verdicts: Iterable[Verdict]) -> dict[str, Timing]:
    """Seconds by step of judging: STEPS first, then whatever else was recorded."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    # the oracles of one case share its clock, which runs on: the last reading is the case's
    for verdict in verdicts:
        case = verdict.case
        for step, seconds in verdict.seconds.items():
            readings = found[step]
            if seconds >= readings.get(case, 0.0):
                readings[case] = seconds
    return {
        step: _timing(sorted(found[step].values()))
        for step in sorted(found, key=lambda step: (_place(step), step))
    }


def _timing(ordered: list[float]) -> Timing:
    return {"median": quantile(ordered, 0.5), "maximum": ordered[-1], "total": math.fsum(ordered)}


def _place(step: str) -> int:
    return STEPS.index(step) if step in STEPS else len(STEPS)


def samples(verdicts: Sequence[Verdict]) -> dict[str, list[Sample]]:
    """Points for the plots, by tensor: the worst by r and by error, and an even choice of the
    others, ordered by seqlen_kv."""
    found = {name: _samples(verdicts, name) for name in PLOTTED}
    return {name: points for name, points in found.items() if points}


def _samples(verdicts: Sequence[Verdict], tensor: str) -> list[Sample]:
    r, error = f"r_{tensor}", f"max_error_{tensor}"
    having = [v for v in verdicts if "seqlen_kv" in v.measures and {r, error} & v.measures.keys()]
    having.sort(key=lambda v: (v.measures["seqlen_kv"], v.case, v.oracle))
    whole: list[Sample] = [
        {
            "seqlen_kv": v.measures["seqlen_kv"],
            "r": v.measures.get(r),
            "max_error": v.measures.get(error),
            "error_bound": v.measures.get(f"error_bound_{tensor}"),
        }
        for v in having
    ]
    return [
        {
            "seqlen_kv": sample["seqlen_kv"],
            "r": _short(sample["r"]),
            "max_error": _short(sample["max_error"]),
            "error_bound": _short(sample["error_bound"]),
        }
        for sample in fewer(whole)
    ]


def _short(value: float | None) -> float | None:
    """To five digits: more than a plot shows, and half of the bytes of a report."""
    return None if value is None else short(value, 5)


def fewer(points: Sequence[Sample]) -> list[Sample]:
    """At most MAX_SAMPLES of the points, in their order: the worst by r and by error, and an even
    choice of the others."""
    if len(points) <= MAX_SAMPLES:
        return list(points)
    worst = [
        [-1.0 if value is None else value for value in values]
        for values in ([s["r"] for s in points], [s["max_error"] for s in points])
    ]
    even = MAX_SAMPLES - len(worst)
    keep = {round(i * (len(points) - 1) / (even - 1)) for i in range(even)}
    for values in worst:
        keep.add(max(range(len(points)), key=lambda i: (badness(values[i]), -i)))
    return [points[i] for i in sorted(keep)]
