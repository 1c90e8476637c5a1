"""The operations of a recorded program on arrays in registers, and a loop that makes them again
(`verify.cell.triton_interpreter_replay`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Effect = tuple[Callable[..., Any], list[Array]]


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: `made` of the arrays in the registers `given` goes to the registers `to`.

    effect: it changes memory, and waits for the end of the program.  reads: it reads memory, or can
    raise.
    """

    made: Callable[..., Any]
    given: tuple[int, ...]
    to: tuple[int, ...]
    effect: bool = False
    reads: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A branch's steps as `follow` reads them: those that a launch makes once, and their results;
    and those that each program makes."""

    once: list[tuple[Any, ...]]
    results: list[int]
    each: list[tuple[Any, ...]]


def follow(steps: list[tuple[Any, ...]], registers: list[Any], effects: list[Effect]) -> None:
    """Make these steps, as `plain` gives them, in the registers; effects are only noted."""
    for count, made, a, b, c, to, ended in steps:
        if count == 2:
            registers[to] = made(registers[a], registers[b])
        elif count == 1:
            registers[to] = made(registers[a])
        elif count == 3:
            registers[to] = made(registers[a], registers[b], registers[c])
        elif count == 0:
            effects.append((made, [registers[each] for each in a]))
        else:
            results = made(*[registers[each] for each in a])
            for where, result in zip(to, results, strict=True):
                registers[where] = result
        for each in ended:
            registers[each] = None


def plain(step: Step, ended: tuple[int, ...]) -> tuple[Any, ...]:
    """A step as `follow` reads it.  ended: the registers that it empties."""
    count = len(step.given)
    if step.effect:
        return (0, step.made, step.given, 0, 0, 0, ended)
    if len(step.to) == 1 and 1 <= count <= 3:
        a, b, c = (*step.given, 0, 0)[:3]
        return (count, step.made, a, b, c, step.to[0], ended)
    made = step.made if len(step.to) != 1 else _in_tuple(step.made)
    return (4, made, step.given, 0, 0, step.to, ended)


def _in_tuple(made: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arrays: (made(*arrays),)
