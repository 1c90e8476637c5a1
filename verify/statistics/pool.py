"""A campaign's rows pooled by variant, dtype and tensor, beside what honest arithmetic stays
within."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from verify.evidence import Verdict
from verify.statistics.limits import FALSE_ALARM, MODEL, mean_limit, rows_for_note, square_limit

_TESTS = 4  # of each pool: rms, mean, toward, weighed
_SURE = 3.0  # standard deviations by which a mean must pass its limit, for `Pool.noise`
_SEED = re.compile(r"(?:^|,)seed=(\d+)")
_SUMS = ("rows", "z2", "z", "toward", "slack", "least", "share", "part", "weight", "weighed")


@dataclass(frozen=True)
class Pool:
    """All judged rows of one tensor of one (variant, dtype): averages over rows.

    rms: root of the mean of z^2; mean: of z; toward: of z with the exact value's sign, negative if
    results are too small; slack: the part of z that is allowed besides roundings; least: mean of
    error^2 over the least that roundings give, and share: how much of that least is due to
    roundings on the way; part: what these roundings add to the mean of z^2 at least.  weighed: root
    of the mean of error^2 / (sigma^2 + allowance^2), each element weighted by the part of errors of
    weights in that; weight: the sum of these weights over the rows, 0 where the evidence has
    none: nothing is asked then.  worst: the case that says most, for each test.
    rms_limit, mean_limit, weighed_limit: what honest rows stay below (mean_limit with the slack).
    """

    variant: str
    dtype: str
    tensor: str
    cases: int
    rows: int
    rms: float
    mean: float
    toward: float
    slack: float
    least: float
    share: float
    part: float
    weight: float
    weighed: float
    worst: Mapping[str, str]
    rms_limit: float
    mean_limit: float
    weighed_limit: float

    @property
    def excesses(self) -> Iterator[tuple[str, float, float]]:
        """(which, value, limit) of every test that fails; NaN fails."""
        for name, limit in (
            ("rms", self.rms_limit),
            ("mean", self.mean_limit),
            ("toward", self.mean_limit),
            ("weighed", self.weighed_limit),
        ):
            value = getattr(self, name)
            if not abs(value) <= limit:
                yield name, value, limit

    @property
    def noise(self) -> float:
        """How large a further independent error of the roundings on the way (of P, of dS) must be,
        in units of theirs, so that the root mean square fails; inf if none would.

        The mean of z^2 over the rows must pass its limit by _SURE of its standard deviations, of at
        most sqrt(2 / rows) of it.
        """
        certain = 1 - _SURE * math.sqrt(2 / self.rows)
        if not self.part > 0 or not certain > 0:
            return math.inf
        return math.sqrt(max(self.rms_limit**2 / certain - self.rms**2, 0.0) / self.part)

    @property
    def too_good(self) -> bool:
        """Whether errors are smaller than the declared roundings can leave them: wider arithmetic,
        or the reference itself."""
        return self.rows >= rows_for_note(self.share) and self.least < 1 - self.share / 2


def pools(verdicts: Iterable[Verdict]) -> list[Pool]:
    """One Pool for each (variant, dtype, tensor) that has judged rows, sorted by that key.

    Cases of one seed share values, so only the one with most rows counts; configs that were asked
    the same problem are averaged.  Cases that were chosen because they failed or were worst before
    count nowhere: only what was generated does.
    """
    found: dict[tuple[str, str, str], dict[str, list[Verdict]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for verdict in verdicts:
        if verdict.phase == "generate":
            for tensor in (
                name.removeprefix("rows_") for name in verdict.measures if name.startswith("rows_")
            ):
                found[verdict.variant, verdict.dtype, tensor][verdict.problem].append(verdict)
    chance = FALSE_ALARM / (_TESTS * max(len(found), 1))
    return [_pool(key, found[key], chance) for key in sorted(found)]


def _pool(
    key: tuple[str, str, str], problems: Mapping[str, Sequence[Verdict]], chance: float
) -> Pool:
    variant, dtype, tensor = key
    by_seed: dict[str, tuple[float, str]] = {}
    for problem, heard in problems.items():
        seed = _SEED.search(problem)
        name = seed[1] if seed else "0"
        by_seed[name] = max(
            by_seed.get(name, (-1.0, "")), (heard[0].measures[f"rows_{tensor}"], problem)
        )
    kept = sorted(problem for _, problem in by_seed.values())
    average = {
        name: math.fsum(_mean(problems[p], f"{name}_{tensor}") for p in kept) for name in _SUMS
    }
    rows = average["rows"]
    cases = [v for p in kept for v in problems[p]]
    slack, mean = average["slack"] / rows, mean_limit(rows, chance)
    weight = average["weight"]
    return Pool(
        variant=variant,
        dtype=dtype,
        tensor=tensor,
        cases=len(cases),
        rows=round(rows),
        rms=math.sqrt(average["z2"] / rows),
        mean=average["z"] / rows,
        toward=average["toward"] / rows,
        slack=slack,
        least=average["least"] / rows,
        share=average["share"] / rows,
        part=average["part"] / rows,
        weight=weight,
        weighed=math.sqrt(average["weighed"] / weight) if weight > 0 else 0.0,
        worst={
            name: _most(cases, tensor, key, average[key])
            for name, key in (
                ("rms", "z2"),
                ("mean", "z"),
                ("toward", "toward"),
                ("weighed", "weighed"),
            )
        },
        rms_limit=math.sqrt(square_limit(rows, chance)) * (1 + MODEL),
        mean_limit=slack + mean + MODEL,
        weighed_limit=math.sqrt(square_limit(weight, chance)) * (1 + MODEL),
    )


def _most(verdicts: Sequence[Verdict], tensor: str, key: str, sign: float) -> str:
    """The case whose rows add most to a sum of that sign, by the chance of it: a few rows may do so
    by luck."""

    def weight(v: Verdict) -> float:
        return (
            math.copysign(1.0, sign)
            * v.measures.get(f"{key}_{tensor}", 0.0)
            / math.sqrt(v.measures[f"rows_{tensor}"])
        )

    return max(verdicts, key=lambda v: (weight(v), v.case)).case


def _mean(verdicts: Sequence[Verdict], measure: str) -> float:
    """The mean of a measure; 0 for one that evidence of an earlier day lacks."""
    return math.fsum(v.measures.get(measure, 0.0) for v in verdicts) / len(verdicts)
