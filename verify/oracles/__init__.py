"""Oracles: each file defines one property, for the forward and the backward.

The package finds every file that defines ORACLE or ORACLES; no list has to be edited.  The
docstring of such a file derives the property: docs/oracles.md is made of these docstrings.

Oracles of one group judge the same cases, so they share runs and references.  The group also says
which problems are drawn and which entry point of a kernel runs.  Most groups are defined here.  An
oracle that shares its cases with no other oracle defines a group in its own file, as GROUP or in
GROUPS.

`use_files` adds files from outside the package.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from references.premises import Premise
from verify.judging.findings import Ruling
from verify.judging.together import Wanted
from verify.judging.trial import Trial
from verify.machine import outside_file
from verify.machine.outside_file import OutsideFileError
from verify.problem import Problem
from verify.problem.distributions import DISTRIBUTIONS
from verify.problem.known_answers import gather_possible
from verify.problem.premises import broken, broken_by
from verify.variant import ENTRIES, Declaration, Support


@dataclass(frozen=True, kw_only=True)
class Group:
    """Oracles that judge the same cases.  about: one line that describes the cases; entry: the
    entry point that is judged.

    outside: draw problems from just outside the support.  distributions: names to draw from, by
    default all ordinary ones.  masked: draw only problems with a mask, if the support has masks.
    excludes_problem: returns the reason why a drawn problem cannot be used, or None.  adapt:
    changes a drawn problem to one that the group can use, or returns None; a result outside the
    support is not used.  asks: returns the problems of a dtype, which replace drawn ones.  admits:
    whether a problem from a case id can be used; by default `adapt` must leave it unchanged, or
    `asks` must return it.  family: one property test covers all groups of a family; it draws the
    group of each case.  first_look: the targets that profile dev asks, since others tell it little
    that is new; "" for all.  "file" or "variant": the first of each kernel file, whose variants,
    configs and dtypes share their indices, or of each variant.  "question": one of each variant,
    and for each question another one; so is every family asked, which is one question.  "config":
    all dtypes of the leading config, and the first dtype of the others.
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
    first_look: Literal["", "file", "variant", "question", "config"] = ""

    def __post_init__(self) -> None:
        """Raise ValueError for an entry point or a distribution that does not exist, and for `asks`
        in a group of a family, which no test would use."""
        if self.entry not in ENTRIES:
            raise ValueError(
                f"group {self.name}: entry: {self.entry!r} is none of {', '.join(ENTRIES)}"
            )
        for name in self.distributions or ():
            if name not in DISTRIBUTIONS:
                known = ", ".join(DISTRIBUTIONS)
                raise ValueError(f"group {self.name}: distributions: {name!r} is none of {known}")
        if self.family and self.asks is not None:
            raise ValueError(f"group {self.name}: asks: a family's problems are drawn")


_SHARED = (
    Group(
        name="accuracy",
        about="random problems over everything that the variant supports",
        first_look="config",
    ),
    Group(
        name="counting",
        about="zero queries: all visible keys have equal weights, so O and LSE count keys",
        distributions=("counting",),
        first_look="question",
    ),
    Group(
        name="gather",
        about="one key wins every row by 160 powers of two: O is a row of V, bit for bit",
        distributions=("gather",),
        excludes_problem=gather_possible,
        first_look="question",
    ),
    Group(
        name="poison",
        about="NaN or huge values where no query sees them",
        masked=True,
        first_look="question",
    ),
    Group(name="refusal", about="one argument just outside the declared support", outside=True),
    Group(
        name="gradients",
        about="dQ, dK and dV of random problems, from the O and LSE of a real forward",
        entry="backward",
        first_look="config",
    ),
    Group(
        name="gradient_refusal",
        about="one argument just outside the declared support of a backward",
        entry="backward",
        outside=True,
    ),
)


def _none(trial: Trial) -> Sequence[Wanted]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """One property of one group's cases.

    name and group identify it in evidence; catches: one line on the faults that it finds; judge
    rules on a trial; rank orders a group's oracles.  Three conditions say which cases it judges, in
    this order:

    1. excludes: returns the reason why it judges no case of a variant, from the declaration, or
       None.  Nothing is recorded.
    2. needs: the premises of its derivation.  A problem with a feature that breaks one of them is
       recorded as inapplicable, with the reason.  It judges no case of a variant whose arithmetic
       breaks one (`Quantised.breaks`).  None: the oracle names no premises, and judges no problem
       that has a feature.
    3. concerns: whether the values of a case can show a fault.  It may compute inputs and truth.
       A case that cannot show one is recorded as inapplicable, without a reason.

    launches: those that `judge` will ask the trial for beside the first, as far as they are known
    before any launch; they are made with it, by one message.
    together: computes for launched cases of one shape what `judge` asks of each, and leaves it in
    their notes.  A case for which it leaves nothing is judged alone.
    """

    name: str
    group: str
    catches: str
    judge: Callable[[Trial], Ruling]
    excludes: Callable[[Declaration], str | None] = lambda declaration: None
    needs: frozenset[Premise] | None = None
    concerns: Callable[[Trial], bool] = lambda trial: True
    launches: Callable[[Trial], Sequence[Wanted]] = _none
    together: Callable[[Sequence[Trial]], None] | None = None
    rank: int = 50

    def excludes_variant(self, declaration: Declaration) -> str | None:
        """Return the reason why it judges no case of a variant: `excludes`, or a premise that the
        declared arithmetic breaks; or None."""
        own = self.excludes(declaration)
        return own or broken_by(self.needs, declaration.numerics.quantised)

    def rule(self, trial: Trial) -> Ruling:
        """Return the ruling on a case of a variant that the oracle does not exclude."""
        reason = self._inapplicable(trial)
        return self.judge(trial) if reason is None else Ruling(inapplicable=reason)

    def wanted(self, trial: Trial) -> Sequence[Wanted]:
        """Return the `launches` of a case that it judges."""
        if self.launches is _none or self._inapplicable(trial) is not None:
            return ()
        return self.launches(trial)

    def prepare(self, stack: Sequence[Trial]) -> None:
        """Compute together what can be for those cases of a stack that it judges."""
        if self.together is not None:
            judged = [trial for trial in stack if self._inapplicable(trial) is None]
            if len(judged) > 1:
                self.together(judged)

    def _inapplicable(self, trial: Trial) -> str | None:
        reason = broken(self.needs, trial.problem)
        return "" if reason is None and not self.concerns(trial) else reason


_outside: dict[Path, ModuleType] = {}
_only: set[str] = set()  # names; none: all


def use_files(paths: Sequence[Path]) -> None:
    """Use the oracles of these files, and of no other files, in addition to those of the package.

    This holds for the current process from now on.  A file is a module like those of the package,
    and runs in the judge's process.  Raises OutsideFileError if a file does not load, defines no
    oracle, or uses a name that is taken.
    """
    before = dict(_outside)
    found = {path.resolve(): _loaded(path) for path in paths}
    _replace(found)
    try:
        oracles()
    except ValueError as error:
        _replace(before)
        raise OutsideFileError(f"{', '.join(map(str, paths))}: {error}") from None


def use_only(names: Sequence[str]) -> None:
    """Ask the oracles of these names alone, in this process from now on; all if there are none.

    Raises ValueError for a name that no oracle has.
    """
    _only.clear()
    _forget()
    known = dict.fromkeys(oracle.name for oracle in oracles())
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is no file, and none of {', '.join(sorted(known))}")
    _only.update(names)
    _forget()


def used_files() -> tuple[Path, ...]:
    """Return the files outside the package that `use_files` has loaded."""
    return tuple(_outside)


def files_of(group: str) -> tuple[Path, ...]:
    """Return the files outside the package that define an oracle of that group."""
    return tuple(
        path
        for path, module in _outside.items()
        if any(oracle.group == group for oracle in defined(module, "ORACLE"))
    )


def _loaded(path: Path) -> ModuleType:
    module = outside_file.load(path, f"oracle_file_{path.stem}")
    if not defined(module, "ORACLE"):
        raise OutsideFileError(f"{path} defines neither ORACLE nor ORACLES")
    return module


def _replace(found: Mapping[Path, ModuleType]) -> None:
    _outside.clear()
    _outside.update(found)
    _forget()


def _forget() -> None:
    for cached in (groups, oracles, by_module, leading_oracle):
        cached.cache_clear()


def _modules() -> tuple[ModuleType, ...]:
    return (*_of_package(), *_outside.values())


@cache
def _of_package() -> tuple[ModuleType, ...]:
    names = (info.name for info in pkgutil.walk_packages(__path__, f"{__name__}."))
    return tuple(importlib.import_module(name) for name in names)


def defined(module: ModuleType, name: str) -> tuple[Any, ...]:
    """Return what a module defines as `name` (GROUP or ORACLE) and in the tuple of its plural."""
    one = (getattr(module, name),) if hasattr(module, name) else ()
    return (*getattr(module, f"{name}S", ()), *one)


@cache
def groups() -> Mapping[str, Group]:
    """Return all groups by name, shared groups first.  Raises ValueError if two have one name."""
    own = [group for module in _modules() for group in defined(module, "GROUP")]
    return grouped((*_SHARED, *sorted(own, key=lambda group: (group.family, group.name))))


def grouped(several: Sequence[Group]) -> Mapping[str, Group]:
    """Return the given groups by name.  Raises ValueError if two have one name."""
    found: dict[str, Group] = {}
    for group in several:
        if group.name in found:
            raise ValueError(f"group {group.name}: two oracles define a group of that name")
        found[group.name] = group
    return found


@cache
def oracles() -> tuple[Oracle, ...]:
    """Return all oracles, sorted by group and rank."""
    found = [oracle for module in _modules() for oracle in defined(module, "ORACLE")]
    ordinary = ordered(found, groups())
    return tuple(oracle for oracle in ordinary if not _only or oracle.name in _only)


@cache
def by_module() -> Mapping[ModuleType, tuple[Oracle, ...]]:
    """Return the oracles of each module that defines some, in the module's order.  Modules are
    sorted by their first oracle in the order of `oracles`."""
    order = oracles()
    having = {
        module: tuple(oracle for oracle in defined(module, "ORACLE") if oracle in order)
        for module in _modules()
    }
    first = {module: min(map(order.index, own)) for module, own in having.items() if own}
    return {module: having[module] for module in sorted(first, key=first.__getitem__)}


def ordered(several: Sequence[Oracle], known: Mapping[str, Group]) -> tuple[Oracle, ...]:
    """Return the given oracles, sorted by group and rank.

    Raises ValueError for an oracle of an undefined group, which would judge no case, and for two
    oracles of one name in one group.
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
    """Return the oracles of one group, sorted by rank."""
    return tuple(oracle for oracle in oracles() if oracle.group == group)


@cache
def leading_oracle(group: str) -> str:
    """Return the name of the oracle whose verdicts tell which coverage bins a group's cases fill;
    "" if the group's problems are outside the support."""
    asked = of_group(group)
    return "" if groups()[group].outside or not asked else asked[0].name
