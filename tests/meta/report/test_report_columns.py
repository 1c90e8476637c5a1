"""Numbers of a report come from columns: they are those of the verdicts one by one."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.harness.fake_campaign import verdict
from verify.evidence import Verdict, Verdicts
from verify.evidence.columns import column
from verify.problem.case import Case
from verify.report import pairs, power, ranking, statistics, tallies
from verify.report.statistics import badness, quantile
from verify.statistics.pool import pools

VALUES = (0.0, 0.25, 0.5, 0.5, 2.0, math.inf)
SUMS = ("rows", "z2", "z", "toward", "slack", "least", "share", "part", "weight", "weighed")


def drawn(draw: random.Random, index: int) -> Verdict:
    """A verdict with some measures; equal values and cases of several verdicts are common."""
    seed = draw.randrange(12)
    problem = f"sq={draw.choice([1, 3])},skv=5,d=16,dtype=float16,seed={seed}"
    config = draw.choice(["m64", "m128"])
    measures = {"seqlen_kv": float(draw.choice([1, 5, 5, 9]))}
    measures |= {
        name: draw.choice([*VALUES, math.nan])
        for name in ("r_out", "max_error_out", "error_bound_out", "lse_ulp")
        if draw.random() < 0.8
    }
    if draw.random() < 0.8:
        measures |= {"power_out": draw.choice(VALUES), "tutorial_out": draw.choice(VALUES)}
        measures |= dict.fromkeys(("ulp99_out", "best50_out", "best99_out"), draw.choice(VALUES))
        measures |= {"ulp50_out": draw.random()}
        measures |= {f"{name}_out": draw.uniform(1.0, 4.0) for name in SUMS}
    return replace(
        verdict("v", "float16", index),
        case=f"v:{config}:accuracy:{problem}",
        config=config,
        group="accuracy",
        problem=problem,
        oracle=f"oracle {index % 5}",
        outcome=draw.choice(["pass", "pass", "fail"]),
        phase=draw.choice(["generate", "witness"]),
        seconds={step: draw.random() for step in ("run", "bound") if draw.random() < 0.9},
        measures=measures,
        bins=tuple(draw.sample(["a", "b", "c"], draw.randrange(3))),
    )


@pytest.fixture(params=range(12))
def verdicts(request: pytest.FixtureRequest) -> Verdicts:
    """Distinct in case and oracle, in tables whose rows are in no order."""
    draw = random.Random(request.param)
    found = {(v.case, v.oracle): v for v in (drawn(draw, index) for index in range(90))}
    return Verdicts.of(found.values())


def having(verdicts: Iterable[Verdict], *names: str) -> list[Verdict]:
    return [v for v in verdicts if all(name in v.measures for name in names)]


def same(one: object, other: object) -> bool:
    """Equal, with NaN equal to itself."""
    return repr(one) == repr(other)


def test_distributions(verdicts: Verdicts) -> None:
    values = sorted((v.measures["r_out"] for v in having(verdicts, "r_out")), key=badness)
    found = statistics.spread(verdicts, "r_out")
    assert found is not None
    assert found["count"] == len(values)
    assert same([found["minimum"], found["maximum"]], [values[0], values[-1]])
    assert same(found["p90"], quantile(values, 0.9))
    edges = statistics.EDGES_R
    upper = [sum(value <= edge for value in values) for edge in edges[1:]]
    counts = [upper[0], *(b - a for a, b in pairwise(upper))]
    counts[-1] += sum(map(math.isnan, values))
    assert found["histogram"] == counts


def test_the_worst_of_equals_has_the_first_name(verdicts: Verdicts) -> None:
    ratios = having(verdicts, "r_out")
    top = max((v.measures["r_out"] for v in ratios), key=badness)
    first = next(v for v in ratios if same(v.measures["r_out"], top))
    worst = statistics.tensors(verdicts)["out"]["worst"]
    assert (worst["case"], worst["oracle"]) == (first.case, first.oracle)
    assert same(worst["r"], top)
    assert same(statistics.largest(verdicts)["out"], top)


def test_timings(verdicts: Verdicts) -> None:
    last: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for v in verdicts:
        for step, seconds in v.seconds.items():
            last[step][v.case] = max(seconds, last[step].get(v.case, 0.0))
    found = statistics.timings(verdicts)
    assert {*found} == {*last}
    for step, readings in last.items():
        values = sorted(readings.values())
        assert found[step]["median"] == quantile(values, 0.5)
        assert found[step]["total"] == math.fsum(values)


def test_samples(verdicts: Verdicts) -> None:
    points = [v for v in verdicts if {"r_out", "max_error_out"} & v.measures.keys()]
    points.sort(key=lambda v: (v.measures["seqlen_kv"], v.case, v.oracle))
    even = {round(i * (len(points) - 1) / 13) for i in range(14)}
    for name in ("r_out", "max_error_out"):
        values = [v.measures.get(name, -1.0) for v in points]
        even.add(max(range(len(points)), key=lambda i: (badness(values[i]), -i)))
    wanted = [points[i].measures for i in sorted(even)]
    found = statistics.samples(verdicts)["out"]
    told = [(s["seqlen_kv"], s["r"], s["max_error"], s["error_bound"]) for s in found]
    names = ("seqlen_kv", "r_out", "max_error_out", "error_bound_out")
    assert same(told, [tuple(map(measures.get, names)) for measures in wanted])


def test_bins(verdicts: Verdicts) -> None:
    cases: defaultdict[str, set[str]] = defaultdict(set)
    for v in verdicts:
        cases[v.case] |= {*v.bins}
    wanted = Counter(name for names in cases.values() for name in names)
    assert tallies.bins(verdicts.judged) == wanted


def test_power(verdicts: Verdicts) -> None:
    passing = [v for v in having(verdicts, "power_out") if v.outcome == "pass"]
    best = min(passing, key=lambda v: (v.measures["power_out"], v.case))
    (found,) = (one for one in power.reports(verdicts, ()) if one["fault"] == "out")
    assert (found["case"], found["cases"]) == (best.case, len(passing))
    assert found["strength"] == best.measures["power_out"]
    assert found["tutorial"] == min(v.measures["tutorial_out"] for v in passing)
    assert found["close"] is None


def test_ranking(verdicts: Verdicts) -> None:
    values = sorted(v.measures["ulp50_out"] for v in having(verdicts, "ulp50_out"))
    (found,) = ranking.reports(verdicts)
    assert (found["cases"], found["ulp50"]) == (len(values), quantile(values, 0.5))


def test_pools(verdicts: Verdicts) -> None:
    """Of one seed the problem with most rows counts; those asked the same are averaged."""
    problems: defaultdict[str, list[Verdict]] = defaultdict(list)
    for v in having(verdicts, "rows_out"):
        if v.phase == "generate":
            problems[v.problem].append(v)
    kept: dict[str, tuple[float, str]] = {}
    for problem, asked in problems.items():
        seed = problem.rpartition("=")[2]
        kept[seed] = max(kept.get(seed, (-1.0, "")), (asked[0].measures["rows_out"], problem))
    chosen = [problems[problem] for _, problem in kept.values()]

    def total(name: str) -> float:
        return math.fsum(
            math.fsum(v.measures[f"{name}_out"] for v in asked) / len(asked) for asked in chosen
        )

    (found,) = pools(verdicts)
    assert found.cases == sum(map(len, chosen))
    assert found.mean == total("z") / total("rows")
    assert found.weighed == math.sqrt(total("weighed") / total("weight"))
    most = max(
        (v for asked in chosen for v in asked),
        key=lambda v: (v.measures["z2_out"] / math.sqrt(v.measures["rows_out"]), v.case),
    )
    assert found.worst["rms"] == most.case


def test_the_first_of_equal_rows_is_found_in_any_order() -> None:
    rows = [replace(verdict("v", "float16", 3), case=f"v:m:g:{name}") for name in "cab"]
    same_r = [replace(each, measures={"r_out": 0.5}) for each in rows]
    assert column(Verdicts.of(same_r), "r_out").first_of(0.5).case == "v:m:g:a"


def test_a_column_of_nothing() -> None:
    assert len(column(Verdicts(), "r_out")) == 0
    assert statistics.distribution((), statistics.EDGES_R) is None


SHAPE = "v:m64n64:accuracy:sq=9,skv=9,d=64,dtype=float16"


def pairs_and_parsed(
    cases: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[set[object], list[str]]:
    parsed: list[str] = []
    whole = Case.parse

    def parse(text: str) -> Case:
        parsed.append(text)
        return whole(text)

    monkeypatch.setattr(pairs.Case, "parse", parse)
    every = [replace(verdict("v", "float16", 0), case=case) for case in cases]
    return {*pairs.met(every)}, parsed


def test_siblings_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    siblings = [f"{SHAPE},dist=normal,seed={seed}" for seed in range(9)]
    siblings += [f"{SHAPE},dist=sink,seed=3", SHAPE, f"{SHAPE},seed=4"]
    found, parsed = pairs_and_parsed(siblings, monkeypatch)
    assert len(parsed) == 1
    assert len(found) == 11 * 10 // 2


def test_a_case_that_cannot_be_read_hides_no_sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = f"{SHAPE},dist=normal,dist=sink"
    found, _ = pairs_and_parsed([broken, f"{SHAPE},dist=sink"], monkeypatch)
    assert len(found) == 11 * 10 // 2
    assert pairs_and_parsed([broken], monkeypatch)[0] == set()
