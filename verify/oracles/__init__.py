"""Oracles: one property per file, forward and backward in it.

A file that defines ORACLE, or ORACLES, is found by itself; nothing else has to be touched.  Its
docstring derives the property: docs/oracles.md is made of these docstrings.

Oracles of one group judge the same cases, and so share runs and references.  The group also says
which problems are drawn and which entry point of a kernel answers them.  Most groups are defined
here; an oracle that shares its cases with no other defines its own in its file, as GROUP, or as
one of GROUPS.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from verify.judging.findings import Ruling
from verify.judging.trial import Trial
from verify.problem import Problem
from verify.problem.distributions import DISTRIBUTIONS
from verify.problem.known_answers import gather_possible
from verify.variant import ENTRIES, Declaration, Support


@dataclass(frozen=True, kw_only=True)
class Group:
    """Oracles that judge the same cases.  about: what they are asked, in one line; entry: the entry
    point on trial.

    outside: problems are drawn from just outside the support.  distributions: names to draw from,
    by default all ordinary ones.  masked: only problems with a mask, where the support has one.
    impossible: the reason why a problem that was drawn cannot be used, or None.  adapt: makes of a
    problem that was drawn one that the group can ask, or None; what it makes must lie inside the
    support, or is not asked.  asks: the problems of that dtype, in place of drawn ones. admits:
    whether a problem of an id can be asked; by default one that `adapt` leaves as it is, or that is
    among `asks`. family: groups of one family are heard by one property test, which draws the group
    of each case.
    """

    name: str
    about: str
    entry: str = "forward"
    outside: bool = False
    distributions: tuple[str, ...] | None = None
    masked: bool = False
    excludes_problem: Callable[[Problem], str | None] | None = None
    adapt: Callable[[Problem, Support], Problem | None] | None = None
    asks: Callable[[Declaration, str], Sequence[Problem]] | None = None
    admits: Callable[[Problem, Support], bool] | None = None
    family: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for an entry point or a distribution that does not exist."""
        if self.entry not in ENTRIES:
            raise ValueError(
                f"group {self.name}: entry: {self.entry!r} is none of {', '.join(ENTRIES)}"
            )
        for name in self.distributions or ():
            if name not in DISTRIBUTIONS:
                known = ", ".join(DISTRIBUTIONS)
                raise ValueError(f"group {self.name}: distributions: {name!r} is none of {known}")


_SHARED = (
    Group(name="accuracy", about="random problems over everything that the variant supports"),
    Group(
        name="counting",
        about="zero queries: every visible key weighs the same, so O and LSE count keys",
        distributions=("counting",),
    ),
    Group(
        name="gather",
        about="one key wins every row by 160 powers of two: O is a row of V, bit for bit",
        distributions=("gather",),
        excludes_problem=gather_possible,
    ),
    Group(name="poison", about="NaN or huge values where no query looks", masked=True),
    Group(name="refusal", about="one argument just outside the declared support", outside=True),
    Group(
        name="gradients",
        about="dQ, dK and dV of random problems, from what a real forward saved",
        entry="backward",
    ),
    Group(
        name="gradient_refusal",
        about="one argument just outside the declared support of a backward",
        entry="backward",
        outside=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """name and group; what it catches, in one line; `applies` gives the reason why it does not
    judge a variant, or None; `judge` rules on a trial; `concerns` says whether a problem is its
    business at all; `rank` orders a group's oracles."""

    name: str
    group: str
    catches: str
    judge: Callable[[Trial], Ruling]
    excludes: Callable[[Declaration], str | None] = lambda declaration: None
    concerns: Callable[[Trial], bool] = lambda trial: True
    rank: int = 50


@cache
def _modules() -> tuple[ModuleType, ...]:
    names = (info.name for info in pkgutil.walk_packages(__path__, f"{__name__}."))
    return tuple(importlib.import_module(name) for name in names)


def defined(module: ModuleType, name: str) -> tuple[Any, ...]:
    """What a module defines under that name, GROUP or ORACLE, and in the tuple of its plural."""
    one = (getattr(module, name),) if hasattr(module, name) else ()
    return (*getattr(module, f"{name}S", ()), *one)


@cache
def groups() -> Mapping[str, Group]:
    """All groups by name: the shared ones first.  Raises ValueError where two have one name."""
    own = [group for module in _modules() for group in defined(module, "GROUP")]
    return grouped((*_SHARED, *sorted(own, key=lambda group: (group.family, group.name))))


def grouped(several: Sequence[Group]) -> Mapping[str, Group]:
    """Those groups by name.  Raises ValueError where two have one name."""
    found: dict[str, Group] = {}
    for group in several:
        if group.name in found:
            raise ValueError(f"group {group.name}: two oracles define a group of that name")
        found[group.name] = group
    return found


@cache
def oracles() -> tuple[Oracle, ...]:
    """All oracles, by group and rank."""
    found = [oracle for module in _modules() for oracle in defined(module, "ORACLE")]
    return ordered(found, groups())


@cache
def by_module() -> Mapping[ModuleType, tuple[Oracle, ...]]:
    """The oracles of each module that defines some, as it lists them; the modules in the order of
    `oracles`, each where the first of its own stands there."""
    order = oracles()
    having = {module: defined(module, "ORACLE") for module in _modules()}
    first = {module: min(map(order.index, own)) for module, own in having.items() if own}
    return {module: having[module] for module in sorted(first, key=first.__getitem__)}


def ordered(several: Sequence[Oracle], known: Mapping[str, Group]) -> tuple[Oracle, ...]:
    """Those oracles by group and rank.

    Raises ValueError for an oracle of a group that nobody defines, which no case would reach, and
    for two of one name in one group.
    """
    seen = set()
    for oracle in several:
        if oracle.group not in known:
            raise ValueError(
                f"oracle {oracle.name}: group: {oracle.group!r} is none of {', '.join(known)}"
            )
        if (oracle.name, oracle.group) in seen:
            raise ValueError(f"oracle {oracle.name}: group {oracle.group} has two of that name")
        seen.add((oracle.name, oracle.group))
    order = list(known)
    return tuple(
        sorted(several, key=lambda oracle: (order.index(oracle.group), oracle.rank, oracle.name))
    )


def of_group(group: str) -> tuple[Oracle, ...]:
    """The oracles of one group, by rank."""
    return tuple(oracle for oracle in oracles() if oracle.group == group)


@cache
def leading_oracle(group: str) -> str:
    """The oracle whose verdicts say which coverage bins a group's cases fill; none where problems
    are outside a support."""
    return "" if groups()[group].outside else of_group(group)[0].name
