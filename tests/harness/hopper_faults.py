"""Faults of the forwards for Hopper: mistakes that a kernel's author makes, which tests plant into
copies of the sources.

A program holds all of them; its variable `planted` says which one is there, by its place in a list.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.harness.cute_hopper_host import Map


@dataclass(frozen=True)
class Switch:
    """A text of the sources and what it becomes while a fault is planted: an expression, or, if it
    ends with a semicolon, statements.

    before, after: what stands around it.  With both it occurs once in all files together.
    """

    right: str
    wrong: str
    before: str = ""
    after: str = ""

    @property
    def pattern(self) -> str:
        """The text where it stands, as a regular expression."""
        before = f"(?<={re.escape(self.before)})" if self.before else ""
        after = f"(?={re.escape(self.after)})" if self.after else ""
        return f"{before}{re.escape(self.right)}{after}"


@dataclass(frozen=True)
class Fault:
    """A mistake and what shows it.

    switches: what changes in the sources.  build: of the harness's `BUILDS`.  problem: the
    question.  by: the oracle that convicts it.  slow: which role is slow, of the harness's `ROLES`.
    map_of: the tensor whose map changes, by `changed`.
    """

    switches: tuple[Switch, ...]
    build: str
    problem: str
    by: str
    slow: str = ""
    map_of: str = ""
    changed: Callable[[Map], None] = lambda made: None


def switched(texts: Mapping[str, str], faults: Iterable[Iterable[Switch]]) -> dict[str, str]:
    """The texts with all faults, each where `planted` is its number.  Lines keep their numbers.

    Raises ValueError if the text of a switch does not occur exactly once.
    """
    places: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for n, switches in enumerate(faults):
        for switch in switches:
            places[switch.pattern].append((n, switch.wrong))
    patterns = [*places]
    every = re.compile("|".join(f"({pattern})" for pattern in patterns))
    counts = dict.fromkeys(patterns, 0)

    def choice(match: re.Match[str]) -> str:
        assert match.lastindex is not None
        pattern = patterns[match.lastindex - 1]
        counts[pattern] += 1
        return _choice(match[0], places[pattern])

    made = {name: every.sub(choice, text) for name, text in texts.items()}
    for pattern, count in counts.items():
        if count != 1:
            raise ValueError(f"{pattern!r} occurs {count} times, not once")
    return made


def _choice(right: str, wrongs: Iterable[tuple[int, str]]) -> str:
    if not right.endswith(";"):
        cases = "".join(f"planted == {n} ? ({wrong}) : " for n, wrong in wrongs)
        return f"({cases}({right}))"
    cases = "".join(f"if (planted == {n}) {{ {wrong} }} else " for n, wrong in wrongs)
    return f"{cases}{{ {right} }}".replace("\n", " ") + "\n" * right.count("\n")


def one_switch(
    right: str,
    wrong: str,
    problem: str = "",
    by: str = "bound",
    *,
    plain: str,
    build: str = "small",
    before: str = "",
    after: str = "",
    slow: str = "",
) -> Fault:
    """A fault of one switch.  plain: the problem, if none is given."""
    return Fault((Switch(right, wrong, before, after),), build, problem or plain, by, slow)
