"""Cases that are judged beside a drawn one: their reference and bounds are computed together.

Random problems rarely have the same shape.  The *siblings* of a problem have, and differ from it in
their values: another distribution, another seed.  They follow from the problem alone.  Each is a
case of its own, with its own launch, id, verdicts and history; a stack gives them nothing but the
numbers that each would get alone (`verify.judging.stacked`).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence

from verify.campaign.targets import Target
from verify.judging import stacked_gradients
from verify.judging.compared import compare_together, results_of
from verify.judging.kept_scores import keeping
from verify.judging.stacked import Asked, answer
from verify.judging.stacked_gradients import AskedGradients
from verify.judging.together import shared
from verify.judging.trial import Trial
from verify.machine.settings import SIBLINGS
from verify.oracles import Oracle, groups
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.statistics import power, power_gradients
from verify.statistics.block_rows import of_stack, stacks_of
from verify.statistics.forward import measure_together
from verify.tolerance.forward import ForwardArithmetic, resolve

# Groups whose oracles ask the truth and gradients of a case's own problem before anything else.
STACKED = frozenset({"accuracy", "gradients"})
_LEAST_SPREAD, _MOST_SPREAD = 2.0**-12, 2.0**6


def prepare(trials: Sequence[Trial]) -> list[Trial]:
    """Compute together what can be for these trials, and give each its part; returns those whose
    inputs and arithmetic do not raise.  The others will raise again when they are judged."""
    asked: list[tuple[Trial, Asked]] = []
    for trial in trials:
        try:
            asked.append((trial, Asked(trial.problem, trial.expanded, _questions(trial))))
        except (ValueError, RuntimeError):
            continue
    answer([each for _, each in asked])
    for trial, each in asked:
        trial.answers += each.answers
        trial.clock.share(each.clock)
    return [trial for trial, _ in asked]


def prepare_gradients(trials: Sequence[Trial]) -> None:
    """Compute together what can be of the gradients of these trials whose forward has saved O and
    LSE, and give each its part."""
    asked: list[tuple[Trial, AskedGradients]] = []
    for trial in trials:
        if trial.entry == "backward" and (trial.own_softmax or _good(trial, "saved")):
            with contextlib.suppress(ValueError, RuntimeError):  # it will be raised again
                asked.append((trial, AskedGradients(trial.gradient_question)))
    stacked_gradients.answer([each for _, each in asked])
    for trial, each in asked:
        trial.gradient_answers += each.answers
        trial.clock.share(each.clock)


def prepare_comparisons(trials: Sequence[Trial], asked: Sequence[Oracle] = ()) -> None:
    """Compare together the results of those trials that were launched, and whose truth was computed
    together, and compute what they certify, and what these oracles ask of many at once."""
    ready = []
    for trial in trials:
        answers = trial.gradient_answers if trial.entry == "backward" else trial.answers
        if answers and _good(trial, "first"):
            ready.append(trial)
    for stack in compare_together(ready):
        with _alone_again():
            if stack[0].entry == "backward":
                power_gradients.certify_together(stack)
            else:
                errors = [results_of(trial).tensors["out"].comparison.error for trial in stack]
                power.certify_together(stack, errors)
        _read_rows(stack)
        for oracle in asked:
            with _alone_again():
                oracle.prepare(stack)


def _alone_again() -> contextlib.AbstractContextManager[None]:
    """What is raised for a stack, each of its cases will raise again, or not."""
    return contextlib.suppress(ValueError, RuntimeError)


def _read_rows(stack: Sequence[Trial]) -> None:
    """Compute together what follows from the weights of some rows: statistics and strengths."""
    if stack[0].entry == "backward":
        for reading in stacks_of(stack, power_gradients.positions_of):
            with _alone_again(), shared(reading, "power"):
                power_gradients.certify_rows(reading)
        return
    for reading in stacks_of(stack):
        with _alone_again():
            with shared(reading, "statistics"):
                rows = of_stack(reading)
                measure_together(reading, rows)
            with shared(reading, "power"):
                power.certify_rows(reading, rows)


def _good(trial: Trial, tag: str) -> bool:
    made = trial.launches.get(tag)
    return made is not None and made.reply.ok and made.damage is None


def _questions(trial: Trial) -> list[list[ForwardArithmetic]]:
    """The arithmetics of a forward that the oracles of accuracy and of gradients ask about."""
    if trial.entry == "backward":  # of the O and LSE that were saved
        return [[trial.arithmetic.without_interval, *trial.asked_arithmetics[1:]]]
    questions = [trial.asked_arithmetics]
    p, declaration = trial.problem, trial.declaration
    if declaration.undeclared:
        sharper = keeping(declaration.numerics, p.dtype)
        if sharper is not None:
            questions.append([resolve(sharper, trial.config, p, trial.arch)])
    return questions


def siblings(target: Target, problem: Problem) -> list[Problem]:
    """As many siblings as VERIFY_SIBLINGS says, less those that the target does not ask; none of a
    problem that other values make no harder."""
    count = int(os.environ.get(SIBLINGS, "0"))
    if not count or target.group not in STACKED or not _weighs(problem):
        return []
    names = groups()[target.group].distributions or ordinary()
    at = names.index(problem.distribution) if problem.distribution in names else 0
    found = []
    for number in range(1, count + 1):
        # The last three bits say whether a case gets the bound of the best arithmetic.
        values = names[(at + number) % len(names)], problem.seed ^ number << 3
        found += like(target, problem, values)
    return found


def _weighs(problem: Problem) -> bool:
    """Whether keys share the weight of a row: there are two at least, and their scores neither
    vanish nor leave all of it to one."""
    spread = abs(problem.scale) * math.sqrt(problem.head_dim)  # of scores of standard normal values
    return problem.seqlen_kv > 1 and _LEAST_SPREAD < spread < _MOST_SPREAD


def like(target: Target, problem: Problem, values: tuple[str, int]) -> list[Problem]:
    """The problem with the values of that distribution and seed, if the target asks it; or none."""
    other = problem.valued(*values)
    return [other] if target.fitted(other) == other else []
