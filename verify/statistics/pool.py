"""A campaign's rows pooled by variant, dtype and tensor, beside what honest arithmetic stays
within."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from verify.evidence import Verdict, Verdicts
from verify.evidence.columns import Block, all_blocks
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
    generated = Verdicts.of(verdicts).where(lambda shape, said: shape.phase == "generate")
    found: dict[tuple[str, str, str], list[Block]] = {}
    for (variant, dtype), those in generated.by_dtype().items():
        for block in all_blocks(those):
            for name in block.measures:
                if name.startswith("rows_"):
                    key = variant, dtype, name.removeprefix("rows_")
                    found.setdefault(key, []).append(block)
    chance = FALSE_ALARM / (_TESTS * max(len(found), 1))
    return [_pool(key, _Rows(found[key], key[2]), chance) for key in sorted(found)]


class _Rows:
    """The sums that cases have of one tensor, of those cases alone that count."""

    def __init__(self, blocks: list[Block], tensor: str) -> None:
        cases = [case for block in blocks for case in block.table.cases]
        sums = {
            name: np.concatenate([block.measure(f"{name}_{tensor}", 0.0) for block in blocks])
            for name in _SUMS
        }
        problems = _one_of_each_seed(blocks, cases, sums["rows"].tolist())
        kept = [place for places in problems for place in places]
        self.cases = [cases[place] for place in kept]
        self.sums = {name: values[kept] for name, values in sums.items()}
        self._ends = list(accumulate(map(len, problems)))

    def total(self, name: str) -> float:
        """The sum over problems of the mean over those who were asked it."""
        values = self.sums[name].tolist()
        if len(values) == len(self._ends):
            return math.fsum(values)
        begins = [0, *self._ends[:-1]]
        return math.fsum(
            math.fsum(values[begin:end]) / (end - begin)
            for begin, end in zip(begins, self._ends, strict=True)
        )

    def most(self, name: str, sign: float) -> str:
        """The case whose rows add most to a sum of that sign, by the chance of it: a few rows may
        do so by luck."""
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = math.copysign(1.0, sign) * self.sums[name] / np.sqrt(self.sums["rows"])
        largest = np.fmax.reduce(weights)
        same = np.flatnonzero(weights == largest).tolist() or range(len(weights))
        return max(self.cases[place] for place in same)


def _one_of_each_seed(blocks: list[Block], cases: list[str], rows: list[float]) -> list[list[int]]:
    """The places of the cases of each problem that counts: of one seed the one with most rows, by
    the first of its cases and oracles."""
    problems: dict[str, list[int]] = {}
    every = (problem for block in blocks for problem in block.table.problems)
    for place, problem in enumerate(every):
        problems.setdefault(problem, []).append(place)
    ends = np.cumsum([len(block) for block in blocks])

    def order(place: int) -> tuple[str, str]:
        block = blocks[int(np.searchsorted(ends, place, "right"))]
        return cases[place], block.oracle

    by_seed: dict[str, tuple[float, str]] = {}
    for problem, places in problems.items():
        seed = _SEED.search(problem)
        name = seed[1] if seed else "0"
        first = min(places, key=order) if len(places) > 1 else places[0]
        by_seed[name] = max(by_seed.get(name, (-1.0, "")), (rows[first], problem))
    return [problems[problem] for _, problem in by_seed.values()]


def _pool(key: tuple[str, str, str], of: _Rows, chance: float) -> Pool:
    variant, dtype, tensor = key
    average = {name: of.total(name) for name in _SUMS}
    rows = average["rows"]
    slack, mean = average["slack"] / rows, mean_limit(rows, chance)
    weight = average["weight"]
    return Pool(
        variant=variant,
        dtype=dtype,
        tensor=tensor,
        cases=len(of.cases),
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
            name: of.most(key, average[key])
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
