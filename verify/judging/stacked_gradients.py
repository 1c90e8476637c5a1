"""Gradients and bounds of many cases at once: as `stacked`, for a backward.

`backward.gradient_truth` decides a few things for a whole problem from its values: whether anything
is near an overflow, whether the best bound can be asked.  A stack is of cases for which it decides
the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from verify.judging.gradient_truth import GradientAnswer, GradientQuestion
from verify.judging.stacked import answered, parts_of, stacked, stacks
from verify.judging.truth import Clock, on_device
from verify.problem import Problem
from verify.tolerance.backward import kind_of

_COST = 3.0  # of a forward's products, and of the tensors that live at once


@dataclass
class AskedGradients:
    """What is to be known of one case's gradients; the answer comes in `answers`, and the seconds
    that it took, its share of the stack's, in `clock`."""

    question: GradientQuestion
    answers: list[GradientAnswer] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)

    @property
    def problem(self) -> Problem:
        return self.question.problem


def excludes(question: GradientQuestion) -> str | None:
    """Why a case cannot be a part of a stack, or None."""
    if question.problem.quantisation.scaled:
        return "quantisation: the arithmetic depends on the factors"
    if not question.problem.pairs:
        return "no query has a key"
    if question.unknown is not None:
        return "no declaration: the bounds of a forward of its own are needed"
    return None


def answer(asked: Sequence[AskedGradients]) -> int:
    """Answer the questions of those cases that have company; return how many these are.

    A case without an answer has to be computed alone.
    """
    kinds = {id(each): _kind(each.question) for each in asked if excludes(each.question) is None}

    def alike(mine: AskedGradients, other: AskedGradients) -> bool:
        same = mine.question.arithmetics == other.question.arithmetics
        return same and kinds[id(mine)] == kinds[id(other)]

    fitting = [each for each in asked if id(each) in kinds]
    return answered(stacks(fitting, alike, _COST), _answer)


def _kind(question: GradientQuestion) -> tuple[bool, ...]:
    return kind_of(question.problem, question.tensors, question.arithmetics)


def _answer(stack: list[AskedGradients]) -> None:
    questions = [case.question for case in stack]
    counts = [question.problem.batch for question in questions]
    q, k, v, dout, out, lse = map(
        torch.cat, zip(*(each.tensors for each in questions), strict=True)
    )
    p = stacked([question.problem for question in questions])
    whole = GradientQuestion(p, (q, k, v), dout, (out, lse), questions[0].arithmetics)
    clock = Clock()
    with clock.timed("bound"):
        found = on_device(sum(each.products for each in questions), whole.computed_on)
    for case, own, count in zip(stack, parts_of(found, counts), counts, strict=True):
        case.answers.append(GradientAnswer(case.question.arithmetics, own))
        case.clock.share(clock, count / p.batch)
