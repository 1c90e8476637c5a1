"""The operations of a recorded program on arrays in registers, and a loop that makes them again
(`verify.cell.triton_interpreter_replay`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_WIDEST = 8  # bytes of an element
_LATE = 5  # in place of a number of operands


class Overlap(Exception):  # noqa: N818 - it is no error
    """A program reads what it has written before."""


@dataclass(frozen=True, slots=True)
class Places:
    """Which operands of an operation on memory are its addresses and its mask, by their numbers;
    mask None: it accesses all of them."""

    addresses: int
    mask: int | None = None

    def span(self, arrays: Sequence[Array]) -> tuple[int, int] | None:
        """The first address that it accesses, and one behind the last; None if it accesses none."""
        addresses = arrays[self.addresses]
        if self.mask is not None:
            addresses = addresses[np.broadcast_to(arrays[self.mask], addresses.shape)]
        if not addresses.size:
            return None
        return int(addresses.min()), int(addresses.max()) + _WIDEST


@dataclass
class Effect:
    """An operation on memory that waits for the end of its program, and its operands."""

    made: Callable[..., Any]
    arrays: list[Array]
    places: Places | None

    @cached_property
    def span(self) -> tuple[int, int] | None:
        """As `Places.span`; all addresses, if its places are not known."""
        return self.places.span(self.arrays) if self.places else (0, 1 << 64)

    def meets(self, span: tuple[int, int]) -> bool:
        """Whether it accesses any of these addresses."""
        return self.span is not None and self.span[0] < span[1] and span[0] < self.span[1]


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: `made` of the arrays in the registers `given` goes to the registers `to`.

    effect: it changes memory, and waits for the end of the program.  reads: it reads memory, or can
    raise.  places: of an operation on memory.  late: it reads after an effect of its program, which
    must not be what it reads.
    """

    made: Callable[..., Any]
    given: tuple[int, ...]
    to: tuple[int, ...]
    effect: bool = False
    reads: bool = False
    places: Places | None = None
    late: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A branch's steps as `follow` reads them: those that a launch makes once, and their results;
    and those that each program makes."""

    once: list[tuple[Any, ...]]
    results: list[int]
    each: list[tuple[Any, ...]]


def follow(steps: list[tuple[Any, ...]], registers: list[Any], effects: list[Effect]) -> None:
    """Make these steps, as `plain` gives them, in the registers; effects are only noted.  Raises
    Overlap."""
    for count, made, a, b, c, to, ended in steps:
        if count == 2:
            registers[to] = made(registers[a], registers[b])
        elif count == 1:
            registers[to] = made(registers[a])
        elif count == 3:
            registers[to] = made(registers[a], registers[b], registers[c])
        elif count == 0:
            effects.append(Effect(made, [registers[each] for each in a], b))
        elif count == _LATE:
            arrays = [registers[each] for each in a]
            span = b.span(arrays)
            if span is not None and any(effect.meets(span) for effect in effects):
                raise Overlap
            registers[to] = made(*arrays)
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
        return (0, step.made, step.given, step.places, 0, 0, ended)
    if step.late:
        return (_LATE, step.made, step.given, step.places, 0, step.to[0], ended)
    if len(step.to) == 1 and 1 <= count <= 3:
        a, b, c = (*step.given, 0, 0)[:3]
        return (count, step.made, a, b, c, step.to[0], ended)
    made = step.made if len(step.to) != 1 else _in_tuple(step.made)
    return (4, made, step.given, 0, 0, step.to, ended)


def _in_tuple(made: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arrays: (made(*arrays),)
