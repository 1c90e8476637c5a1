"""What a campaign asks: one variant, config and dtype before one group of oracles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from hypothesis.strategies import SearchStrategy
from hypothesis.vendor.pretty import RepresentationPrinter

from verify.cell.discovery import environment
from verify.oracles import groups, of_group
from verify.problem import Problem, strategies
from verify.problem.outside import outside
from verify.problem.strategies import LIMITS
from verify.variant import Config, Declaration


@dataclass(frozen=True)
class Target:
    """One variant, config and dtype before one group of oracles: what one property test hears."""

    declaration: Declaration
    config: Config
    dtype: str
    group: str

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:
        """Short: Hypothesis prints a failing test's arguments, and warns of long ones."""
        printer.text(f"<{self.group} of {self.id}>")

    @property
    def id(self) -> str:
        return "-".join((self.declaration.ref, self.config.name, self.dtype))

    @cached_property
    def problems(self) -> SearchStrategy[Problem]:
        """What this target draws, as large as this machine can judge quickly."""
        device = (
            "gpu"
            if environment().device == "cuda"
            else "interpreter"
            if self.declaration.interpreted
            else "cpu"
        )
        group, limits, declaration = groups()[self.group], LIMITS[device], self.declaration
        if group.outside:
            return outside(declaration, dtype=self.dtype, limits=limits).map(lambda pair: pair[0])
        masks = tuple(mask for mask in declaration.support.masks if mask != "full")
        if group.masked and masks:
            declaration = replace(declaration, support=replace(declaration.support, masks=masks))
        drawn = strategies.problems(
            declaration, dtype=self.dtype, limits=limits, distributions=group.distributions
        )
        impossible, adapt, support = group.excludes_problem, group.adapt, self.declaration.support
        if impossible is not None:
            drawn = drawn.filter(lambda problem: impossible(problem) is None)
        if adapt is None:
            return drawn
        adapted = drawn.map(lambda problem: adapt(problem, support)).filter(
            lambda problem: problem is not None and support.refusal(problem) is None
        )
        return cast(SearchStrategy[Problem], adapted)

    @property
    def asked(self) -> Sequence[Problem]:
        """The problems that the group asks of every kernel that supports them, in place of drawn
        ones."""
        asks = groups()[self.group].asks
        found = () if asks is None else asks(self.declaration, self.dtype)
        return [problem for problem in found if self.declaration.support.refusal(problem) is None]


def excludes_group(declaration: Declaration, group: str) -> str | None:
    """Why no oracle of a group judges a variant, or None."""
    if groups()[group].entry not in declaration.entries:
        return f"has no {groups()[group].entry} of its own"
    if groups()[group].outside and all(
        outside(declaration, dtype=dtype, limits=LIMITS["interpreter"]).is_empty
        for dtype in declaration.support.dtypes
    ):
        return "supports everything that can be asked"
    reasons = [oracle.excludes(declaration) for oracle in of_group(group)]
    return None if None in reasons else "; ".join(filter(None, reasons))


def excludes_here(declaration: Declaration) -> str | None:
    """Why a variant cannot run on this machine, or None."""
    if declaration.unavailable is not None:
        return declaration.unavailable
    device = environment().device
    if device not in declaration.support.devices:
        return f"runs on {', '.join(declaration.support.devices)}; this campaign is for {device}"
    return None
