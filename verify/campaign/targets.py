"""Targets: what a campaign judges: one variant, config and dtype with one group of oracles."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from hypothesis.strategies import SearchStrategy
from hypothesis.vendor.pretty import RepresentationPrinter

from verify.cell.discovery import environment
from verify.judging.measuring import probe_problem
from verify.machine.settings import LARGEST
from verify.oracles import Oracle, groups, of_group
from verify.problem import Problem, strategies
from verify.problem.outside import outside
from verify.problem.premises import broken, without_broken
from verify.problem.strategies import LIMITS, Limits
from verify.variant import Config, Declaration


@dataclass(frozen=True)
class Target:
    """One variant, config, dtype and group of oracles: the subject of one property test."""

    declaration: Declaration
    config: Config
    dtype: str
    group: str

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:
        """A short text: Hypothesis prints a failing test's arguments, and warns of long ones."""
        printer.text(f"<{self.group} of {self.id}>")

    @property
    def id(self) -> str:
        return "-".join((self.declaration.ref, self.config.name, self.dtype))

    @cached_property
    def problems(self) -> SearchStrategy[Problem]:
        """The problems that this target draws, small enough for this machine and for
        VERIFY_LARGEST."""
        device = (
            "gpu"
            if environment().device == "cuda"
            else "interpreter"
            if self.declaration.interpreted
            else "cpu"
        )
        return self.within(LIMITS[device].at_most(int(os.environ.get(LARGEST, "0"))))

    def within(self, limits: Limits) -> SearchStrategy[Problem]:
        """The problems that this target draws, no larger than that."""
        if groups()[self.group].outside:
            found = outside(self.declaration, dtype=self.dtype, limits=limits)
            return found.map(lambda pair: pair[0])
        fitting = self.unfitted(limits).map(self.fitted).filter(lambda found: found is not None)
        return cast(SearchStrategy[Problem], fitting)

    def unfitted(self, limits: Limits) -> SearchStrategy[Problem]:
        """What `fitted` makes those problems of, for a group that is inside the support."""
        group, declaration = groups()[self.group], self.declaration
        masks = tuple(mask for mask in declaration.support.masks if mask != "full")
        if group.masked and masks:
            declaration = replace(declaration, support=replace(declaration.support, masks=masks))
        return strategies.problems(
            declaration, dtype=self.dtype, limits=limits, distributions=group.distributions
        )

    def fitted(self, problem: Problem) -> Problem | None:
        """A drawn problem, changed so that the group can ask it; None if it cannot.

        Features that break a premise of its oracles are removed, as far as the support allows it.
        """
        group, support = groups()[self.group], self.declaration.support
        if group.excludes_problem is not None and group.excludes_problem(problem) is not None:
            return None
        whole = excludes_problem(self, problem) is None
        plainer = (
            problem if whole else without_broken(of_group(self.group)[0].needs, problem, support)
        )
        found = plainer if group.adapt is None else group.adapt(plainer, support)
        if found is None or support.refusal(found) is not None:
            return None
        return found if excludes_problem(self, found) is None else None

    @property
    def asked(self) -> Sequence[Problem]:
        """The fixed problems of a group that draws none, as far as the kernel supports them."""
        asks = groups()[self.group].asks
        found = () if asks is None else asks(self.declaration, self.dtype)
        return [
            problem
            for problem in found
            if self.declaration.support.refusal(problem) is None
            and excludes_problem(self, problem) is None
        ]


def targets_of(
    declarations: Sequence[Declaration], group: str, *, all_configs: bool = False
) -> list[Target]:
    """All targets of one group of oracles, in a stable order.

    all_configs: those of the variants' further configs, too.
    """
    return [
        Target(declaration, config, dtype, group)
        for declaration in declarations
        if excludes_group(declaration, group) is None
        for dtype in declaration.support.dtypes
        for config in _configs(declaration, group, all_configs)
    ]


def _configs(declaration: Declaration, group: str, all_configs: bool) -> Sequence[Config]:
    if groups()[group].outside:
        return declaration.configs[:1]
    further = declaration.further_configs if all_configs else ()
    return (*declaration.configs, *map(Config.parse, further))


def excludes_problem(target: Target, problem: Problem) -> str | None:
    """Why no oracle of a target's group is asked about a problem, by its features; or None."""
    reasons = [broken(oracle.needs, problem) for oracle in of_group(target.group)]
    return None if None in reasons else "; ".join(dict.fromkeys(filter(None, reasons)))


def excludes_variant(declaration: Declaration, oracle: Oracle) -> str | None:
    """Why an oracle judges no case of a variant, or None: what it declares, or a feature without
    which it supports no problem."""
    plainest = probe_problem(declaration, declaration.support.dtypes[0], seqlen_q=1, seqlen_kv=1)
    return oracle.excludes_variant(declaration) or broken(oracle.needs, plainest)


def excludes_group(declaration: Declaration, group: str) -> str | None:
    """Why no oracle of a group judges a variant, or None."""
    if groups()[group].entry not in declaration.entries:
        return f"has no {groups()[group].entry} of its own"
    if groups()[group].outside and all(
        outside(declaration, dtype=dtype, limits=LIMITS["interpreter"]).is_empty
        for dtype in declaration.support.dtypes
    ):
        return "supports everything that can be asked"
    reasons = [excludes_variant(declaration, oracle) for oracle in of_group(group)]
    return None if None in reasons else "; ".join(filter(None, reasons))


def excludes_here(declaration: Declaration) -> str | None:
    """Why a variant cannot run on this machine, or None."""
    if declaration.unavailable is not None:
        return declaration.unavailable
    device = environment().device
    if device not in declaration.support.devices:
        return f"runs on {', '.join(declaration.support.devices)}; this campaign is for {device}"
    return None
