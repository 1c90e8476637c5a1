"""Numbers of a campaign: distributions, worst cases, timings.  NaN is worse than infinity, which is
worse than any number."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from verify.brief import short
from verify.evidence import Verdict, Verdicts
from verify.evidence.columns import Block, Column, Numbers, blocks, column, steps
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


def quantile(ordered: Sequence[float] | Numbers, level: float) -> float:
    """The smallest member with at least `level` of the sample at or below it (the inverse of the
    empirical CDF)."""
    return float(ordered[max(math.ceil(level * len(ordered)) - 1, 0)])


def distribution(values: Iterable[float] | Numbers, edges: Sequence[float]) -> Distribution | None:
    """None for no values.  NaN counts in the last interval, so that the histogram adds up to
    `count`."""
    given = values if isinstance(values, np.ndarray) else np.array([*values], np.float64)
    if not len(given):
        return None
    ordered = np.sort(given + 0.0)  # -0 becomes 0; NaN is last
    last = len(edges) - 1
    places = np.where(np.isnan(ordered), last, np.searchsorted(edges, ordered, "left"))
    histogram = np.bincount(np.maximum(places - 1, 0), minlength=last)
    return {
        "count": len(ordered),
        "not_finite": int(np.count_nonzero(~np.isfinite(ordered))),
        "minimum": float(ordered[0]),
        "median": quantile(ordered, 0.5),
        "p90": quantile(ordered, 0.9),
        "p99": quantile(ordered, 0.99),
        "maximum": float(ordered[-1]),
        "histogram": histogram.tolist(),
    }


def spread(verdicts: Iterable[Verdict], measure: str) -> Distribution | None:
    """The distribution of one measure over the verdicts that have it."""
    return distribution(column(Verdicts.of(verdicts), measure).values, EDGES[measure])


def tensors(verdicts: Iterable[Verdict]) -> dict[str, TensorReport]:
    """By name, in the order of TENSORS: every tensor of which some verdict has an r."""
    verdicts = Verdicts.of(verdicts)
    spreads = {name: spread(verdicts, f"r_{name}") for name in TENSORS}
    return {
        name: {"worst": _worst(verdicts, name), "r": found}
        for name, found in spreads.items()
        if found is not None
    }


def _worst(verdicts: Verdicts, tensor: str) -> WorstCase:
    """The verdict with the largest r of a tensor, by the case's name among equals."""
    ratios = column(verdicts, f"r_{tensor}")
    found = ratios.first_of(ratios.largest)
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


def largest(verdicts: Iterable[Verdict]) -> dict[str, float]:
    """The largest r of each tensor of which some verdict has one, in the order of TENSORS."""
    verdicts = Verdicts.of(verdicts)
    found = {name: column(verdicts, f"r_{name}") for name in TENSORS}
    return {name: ratios.largest for name, ratios in found.items() if len(ratios)}


def timings(verdicts: Iterable[Verdict]) -> dict[str, Timing]:
    """Seconds by step of judging: STEPS first, then whatever else was recorded."""
    verdicts = Verdicts.of(verdicts)
    repeated = verdicts.repeated
    found: dict[str, list[Numbers]] = defaultdict(list)
    several: dict[str, dict[str, float]] = defaultdict(dict)
    for table in verdicts.tables:
        alone = np.array([case not in repeated for case in table.cases])
        for step, seconds in steps(table).items():
            found[step].append(seconds[alone & (seconds >= 0)])
            # the rows of one case share its clock, which runs on: the last reading is the case's
            readings = several[step]
            for row in np.flatnonzero(~alone).tolist():
                case = table.cases[row]
                readings[case] = max(readings.get(case, 0.0), float(seconds[row]))
    ordered = {
        step: np.sort(np.concatenate([*parts, [*several[step].values()]]))
        for step, parts in found.items()
    }
    return {
        step: _timing(ordered[step].tolist())
        for step in sorted(ordered, key=lambda step: (_place(step), step))
        if len(ordered[step])
    }


def _timing(ordered: list[float]) -> Timing:
    return {"median": quantile(ordered, 0.5), "maximum": ordered[-1], "total": math.fsum(ordered)}


def _place(step: str) -> int:
    return STEPS.index(step) if step in STEPS else len(STEPS)


def samples(verdicts: Iterable[Verdict]) -> dict[str, list[Sample]]:
    """Points for the plots, by tensor: the worst by r and by error, and an even choice of the
    others, ordered by seqlen_kv."""
    verdicts = Verdicts.of(verdicts)
    found = {name: _samples(verdicts, name) for name in PLOTTED}
    return {name: points for name, points in found.items() if points}


def _samples(verdicts: Verdicts, tensor: str) -> list[Sample]:
    r = f"r_{tensor}"
    error = f"max_error_{tensor}"
    bound = f"error_bound_{tensor}"
    having = [x for x in blocks(verdicts, "seqlen_kv") if r in x or error in x]
    lengths = Column(having, lambda block: block.measure("seqlen_kv"))
    cases = lengths.cases
    oracles = lengths.oracles
    order = np.array(sorted(range(len(cases)), key=lambda i: (cases[i], oracles[i])), np.int64)
    order = order[np.argsort(lengths.values[order], kind="stable")]
    numbers = {name: Column(having, _or_missing(name)).values[order] for name in (r, error, bound)}
    kept = _fewer(len(order), [numbers[name] for name in (r, error)])
    told = {name: [_short(_told(values[i])) for i in kept] for name, values in numbers.items()}
    return [
        {
            "seqlen_kv": float(lengths.values[order[i]]),
            "r": told[r][place],
            "max_error": told[error][place],
            "error_bound": told[bound][place],
        }
        for place, i in enumerate(kept)
    ]


_MISSING = -1.0  # no r, error or bound is negative


def _or_missing(name: str) -> Callable[[Block], Numbers]:
    return lambda block: block.measure(name, _MISSING)


def _told(value: float) -> float | None:
    return None if value == _MISSING else float(value)


def _short(value: float | None) -> float | None:
    """To five digits: more than a plot shows, and half of the bytes of a report."""
    return None if value is None else short(value, 5)


def fewer(points: Sequence[Sample]) -> list[Sample]:
    """At most MAX_SAMPLES of the points, in their order: the worst by r and by error, and an even
    choice of the others."""
    ratios = [_MISSING if point["r"] is None else point["r"] for point in points]
    errors = [_MISSING if point["max_error"] is None else point["max_error"] for point in points]
    kept = _fewer(len(points), [np.array(ratios), np.array(errors)])
    return [points[i] for i in kept]


def _fewer(count: int, numbers: Sequence[Numbers]) -> list[int]:
    """At most MAX_SAMPLES of so many places: the first of the worst by each of the numbers, and an
    even choice of the others."""
    if count <= MAX_SAMPLES:
        return list(range(count))
    even = MAX_SAMPLES - len(numbers)
    keep = {round(i * (count - 1) / (even - 1)) for i in range(even)}
    keep |= {int(np.argmax(values)) for values in numbers}  # NaN is the largest
    return sorted(keep)
