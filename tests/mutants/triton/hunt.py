"""The hunt: a mutant is asked what a campaign asks, the cheapest first, until it is convicted."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tests.faults.search import LEADING, Catch, candidates, convicts
from tests.faults.stand import Stand, finest
from tests.mutants.record import BROKEN, KILLED, SURVIVED, Entry
from tests.mutants.triton.mutant import TritonMutant
from verify.campaign.edge_cases import edge_cases
from verify.campaign.targets import Target, excludes_group
from verify.cell.process import ROOT
from verify.evidence import Verdict
from verify.oracles import groups
from verify.problem import Problem
from verify.problem.refusal import inside
from verify.variant import Config, Declaration

T = TypeVar("T")
Question = tuple[str, Config, Problem]
"""A group of oracles, a config and a problem."""

_FIRST = 4  # cases of a leading group that are asked before those of other groups
_OTHERS = 6  # edge cases of each dtype but the first
_DRAWN = 12  # draws of a leading group
_BEST = 12  # cases that convicted most mutants of the same kernel, which are asked first
# What few draws meet: groups, and problems that they can draw.
_NAMED = (
    # Empty rows whose keys end behind the last one that any row of their tile sees: what lies
    # there is NaN.
    ("poison", "sq=56,skv=86,d=32,dtype=float16,mask=causal.tl+documents.60_26,seed=3"),
    # Rows that see no key, of whose Q and dO it is.
    ("poison_backward", "sq=40,skv=30,d=32,dtype=float16,mask=causal,seed=3"),
    # Keys that no row sees beside others of their block that rows see: their K is NaN.
    (
        "poison_backward",
        "b=2,hq=2,sq=20,skv=40,d=16,dtype=float16,mask=lengths.17_20.33_21,seed=3",
    ),
)


class Kept(Generic[T]):
    """What an iterator yields, made when it is first asked for: to draw all questions of a kernel
    takes seconds, and most mutants are convicted by the first ones."""

    def __init__(self, source: Iterator[T]) -> None:
        self._source = source
        self._made: list[T] = []

    def __iter__(self) -> Iterator[T]:
        for number in itertools.count():
            if number == len(self._made):
                self._made += itertools.islice(self._source, 1)
            if number == len(self._made):
                return
            yield self._made[number]


@dataclass
class TritonHunt:
    """Hunts mutants, one after the other, and remembers what convicts those of a kernel.

    convicting: how many mutants of a variant a question has convicted, of an earlier hunt
    too.
    """

    stand: Stand
    convicting: dict[str, Counter[Question]] = field(default_factory=dict)
    _learned: dict[str, list[Catch]] = field(default_factory=dict)
    _every: dict[str, Kept[Question]] = field(default_factory=dict)

    def learn(self, mutants: Iterable[TritonMutant], entries: Mapping[str, Entry]) -> None:
        """Count the convictions of an earlier hunt, or of another process."""
        for mutant in mutants:
            by = entries[mutant.id].catch if mutant.id in entries else None
            if by is not None:
                self._learned.setdefault(mutant.variant, []).append(by)

    def prepare(self, mutants: Sequence[TritonMutant]) -> None:
        """Count what was learned of the kernels that these change: only they are loaded."""
        for mutant in mutants:
            configs = {config.name: config for config in self._shipped(mutant).configs}
            for by in self._learned.pop(mutant.variant, []):
                if by.config in configs:
                    question = (by.group, configs[by.config], Problem.parse(by.problem))
                    self._count(mutant, question)

    def _count(self, mutant: TritonMutant, question: Question) -> None:
        self.convicting.setdefault(mutant.variant, Counter())[question] += 1

    def _all(self, mutant: TritonMutant) -> Iterator[Question]:
        """All that the mutant's kernel is asked."""
        if mutant.variant not in self._every:
            self._every[mutant.variant] = Kept(_all(self._shipped(mutant)))
        yield from self._every[mutant.variant]

    def _shipped(self, mutant: TritonMutant) -> Declaration:
        return self.stand.load(ROOT / mutant.ground.file, mutant.variant)

    def __call__(self, mutant: TritonMutant) -> Entry:
        """Ask until a verdict fails, or all is asked."""
        begun = time.monotonic()
        asked = 0
        path = mutant.plant(self.stand.folder)
        try:
            declaration = self.stand.load(path, mutant.variant)
        except ValueError:
            return Entry(BROKEN, "", 0, time.monotonic() - begun)
        raised = 0
        try:
            for question in self._questions(mutant):
                group, config, problem = question
                asked += 1
                failing = _failing(self.stand.verdicts(declaration, config, group, problem))
                if failing is None:
                    continue
                if (
                    failing.oracle == "execution"
                    and failing.finding is not None
                    and "raises: " in failing.finding.message
                ):
                    raised += 1
                    if raised == asked and raised < 2:  # of two questions, a build may not compile
                        continue
                    if raised == asked:
                        return Entry(BROKEN, "", asked, time.monotonic() - begun)
                self._count(mutant, question)
                catch = Catch(group, failing.oracle, config.name, problem.name)
                return Entry(KILLED, catch.id, asked, time.monotonic() - begun)
        finally:
            self.stand.afresh(declaration)
        return Entry(SURVIVED, "", asked, time.monotonic() - begun)

    def again(self, mutant: TritonMutant, catch: Catch) -> bool:
        """Whether a mutant is convicted again by the question on record."""
        declaration = self.stand.load(mutant.plant(self.stand.folder), mutant.variant)
        return convicts(self.stand, declaration, catch)

    def _questions(self, mutant: TritonMutant) -> Iterator[Question]:
        """Each once."""
        seen = set()
        best = self.convicting.get(mutant.variant, Counter()).most_common(_BEST)
        for question in itertools.chain((each for each, _ in best), self._all(mutant)):
            name = (question[0], question[1].name, question[2].name)
            if name not in seen:
                seen.add(name)
                yield question


def _failing(verdicts: list[Verdict]) -> Verdict | None:
    return next((verdict for verdict in verdicts if verdict.outcome == "fail"), None)


def _all(shipped: Declaration) -> Iterator[Question]:
    """What a kernel is asked, in a fixed order."""
    open_to = [name for name in groups() if not excludes_group(shipped, name)]
    leading = {name: Kept(_of_leading(shipped, name)) for name in open_to if name in LEADING}
    for name, cases in leading.items():
        yield from ((name, *case) for case in itertools.islice(cases, _FIRST))
    for name, text in _NAMED:
        problem = Problem.parse(text)
        if name in open_to and inside(shipped.support, problem):
            yield name, finest(shipped), problem
    for name in open_to:
        if name not in leading:
            yield from ((name, *case) for case in candidates(shipped, name))
    for name, cases in leading.items():
        yield from ((name, *case) for case in itertools.islice(cases, _FIRST, None))


def _of_leading(shipped: Declaration, group: str) -> Iterator[tuple[Config, Problem]]:
    """The edge cases of the first dtype, some of the others, and draws for all configs."""
    config = finest(shipped)
    edges = []
    for number, dtype in enumerate(shipped.support.dtypes):
        cases = edge_cases(Target(shipped, config, dtype, group))
        for problem in cases[:_OTHERS] if number else cases:
            edges.append(problem)
            yield config, problem
    drawn = [case for case in candidates(shipped, group) if case[1] not in edges]
    yield from drawn[-_DRAWN:]
