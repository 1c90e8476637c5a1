"""Cases that are judged beside a drawn one: their reference and bounds are computed together.

Random problems rarely have the same shape.  The *siblings* of a problem have, and differ from it in
their values: another distribution, another seed.  They follow from the problem alone.  Each is a
case of its own, with its own launch, id, verdicts and history; a stack gives them nothing but the
numbers that each would get alone (`verify.judging.stacked`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from verify.campaign.targets import Target
from verify.judging.kept_scores import keeping
from verify.judging.stacked import Asked, answer
from verify.judging.trial import Trial
from verify.machine.settings import SIBLINGS
from verify.oracles import groups
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.problem.inputs import Inputs
from verify.tolerance.forward import ForwardArithmetic, resolve

# Groups whose oracles ask the truth of a case's own problem before they ask anything else.
STACKED = frozenset({"accuracy"})


@dataclass
class Prepared:
    """What is known of a case before it is judged: its inputs, and truths."""

    inputs: Inputs
    asked: Asked
    seconds: dict[str, float] = field(default_factory=dict)

    def give(self, trial: Trial) -> None:
        """Let a trial of the same case use it."""
        trial.__dict__.update(inputs=self.inputs, expanded=self.asked.inputs)
        trial.answers += self.asked.answers
        for seconds in (self.seconds, self.asked.clock.seconds):
            for name, spent in seconds.items():
                trial.clock.add(name, spent)


def prepare(trials: Sequence[Trial]) -> dict[str, Prepared]:
    """What can be computed together for these trials, by the name of the problem.

    Nothing for a trial whose inputs or arithmetic raise: they will raise again when it is judged.
    """
    found: dict[str, Prepared] = {}
    for trial in trials:
        try:
            asked = Asked(trial.problem, trial.expanded, _questions(trial))
        except (ValueError, RuntimeError):
            continue
        found[trial.problem.name] = Prepared(trial.inputs, asked, trial.clock.seconds)
    answer([prepared.asked for prepared in found.values()])
    return found


def _questions(trial: Trial) -> list[list[ForwardArithmetic]]:
    """The arithmetics that the oracles of a forward's accuracy ask about."""
    questions = [trial.asked_arithmetics]
    p, declaration = trial.problem, trial.declaration
    if declaration.undeclared:
        sharper = keeping(declaration.numerics, p.dtype)
        if sharper is not None:
            questions.append([resolve(sharper, trial.config, p, trial.arch)])
    return questions


def siblings(target: Target, problem: Problem) -> list[Problem]:
    """As many siblings as VERIFY_SIBLINGS says, less those that the target does not ask."""
    count = int(os.environ.get(SIBLINGS, "0"))
    if not count or target.group not in STACKED:
        return []
    names = groups()[target.group].distributions or ordinary()
    at = names.index(problem.distribution) if problem.distribution in names else 0
    found = []
    for number in range(1, count + 1):
        # The last three bits say whether a case gets the bound of the best arithmetic.
        values = names[(at + number) % len(names)], problem.seed ^ number << 3
        found += like(target, problem, values)
    return found


def like(target: Target, problem: Problem, values: tuple[str, int]) -> list[Problem]:
    """The problem with the values of that distribution and seed, if the target asks it; or none."""
    other = problem.but(distribution=values[0], seed=values[1])
    return [other] if target.fitted(other) == other else []
