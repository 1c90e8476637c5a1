"""Mutants: one edit of one file of the collection.  Each language has its operators, and says what
tells its mutants apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

from verify.cell.process import ROOT

T = TypeVar("T")
M = TypeVar("M", bound="Mutant")

SLIGHT = 1 + 2.0**-10  # what a constant of a formula is multiplied by


@dataclass(frozen=True)
class Mutation:
    """One edit: text[start:end] becomes `after`.

    line: of the file, from 1.
    """

    operator: str
    function: str
    line: int
    start: int
    end: int
    after: str

    def applied(self, text: str) -> str:
        """The mutated text."""
        return text[: self.start] + self.after + text[self.end :]


@dataclass(frozen=True)
class Mutant:
    """One mutation of one file.

    edited: the file's path in the collection.
    """

    edited: str
    mutation: Mutation

    @property
    def key(self) -> str:
        """Eight hexadecimal digits of the edit and of the text around it."""
        raise NotImplementedError

    @cached_property
    def id(self) -> str:
        """file:function:operator:key; another one once the function has changed."""
        made = self.mutation
        return f"{Path(self.edited).name}:{made.function}:{made.operator}:{self.key}"

    @cached_property
    def before(self) -> str:
        """What stands there, in one line."""
        return one_line(source(self.edited)[self.mutation.start : self.mutation.end])

    @cached_property
    def after(self) -> str:
        """What the mutant has, in one line."""
        return one_line(self.mutation.after)


def one_line(text: str) -> str:
    """A text without its line breaks."""
    return " ".join(text.split())


@cache
def source(file: str) -> str:
    """The text of a file of the collection."""
    return (ROOT / file).read_text(encoding="utf-8")


def sample(mutants: Iterable[M], wanted: int) -> tuple[M, ...]:
    """So many of them: the operators in turn, of each in an order that depends on the text
    alone."""
    by_operator: dict[str, list[M]] = {}
    for mutant in mutants:
        by_operator.setdefault(mutant.mutation.operator, []).append(mutant)
    queues = [sorted(queue, key=lambda mutant: mutant.key) for queue in by_operator.values()]
    return tuple(in_turn(queues))[:wanted]


def in_turn(queues: list[list[T]]) -> Iterator[T]:
    """The first of each queue, then the second of each..."""
    for number in range(max(map(len, queues), default=0)):
        yield from (queue[number] for queue in queues if number < len(queue))
