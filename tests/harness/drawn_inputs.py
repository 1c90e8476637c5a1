"""A problem's inputs, made once for the emulation, the reference and the bounds of one question: to
make them takes a fifth of the time of a test that emulates a small kernel."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from verify.problem import Problem
from verify.problem.inputs import Inputs, tensors
from verify.problem.inputs import dout as upstream


def drawn(problem: Problem) -> Inputs:
    """`tensors` of the problem on the CPU.  No caller may write into them.

    Raises RuntimeError if a caller has, ProblemError as `tensors` does.
    """
    made, writes = _drawn(problem)
    _check(writes, *made.named.values())
    return made


def drawn_dout(problem: Problem) -> Tensor:
    """`dout` of the problem, likewise."""
    made, writes = _drawn_dout(problem)
    _check(writes, made)
    return made


@lru_cache(maxsize=2)  # a question is about one problem
def _drawn(problem: Problem) -> tuple[Inputs, list[int]]:
    made = tensors(problem)
    return made, _writes(*made.named.values())


@lru_cache(maxsize=2)
def _drawn_dout(problem: Problem) -> tuple[Tensor, list[int]]:
    made = upstream(problem)
    return made, _writes(made)


def _writes(*several: Tensor) -> list[int]:
    """How often each of them has been written into, through whatever view."""
    return [each._version for each in several]


def _check(writes: list[int], *several: Tensor) -> None:
    if _writes(*several) != writes:
        raise RuntimeError("inputs that others read have been written into: copy them first")
