"""Oracles: one file each.  A file that defines ORACLE is found by itself; nothing else has to be touched.

Oracles of one group judge the same cases, and so share runs and references.  The group also says which problems are drawn.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from verify.trial import Ruling, Trial
from verify.variant import Declaration


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """name and group; what it catches, in one line; `applies` gives the reason why it does not judge a variant, or None;
    `judge` rules on a trial; `concerns` says whether a problem is its business at all; `rank` orders a group's oracles."""

    name: str
    group: str
    catches: str
    judge: Callable[[Trial], Ruling]
    applies: Callable[[Declaration], str | None] = lambda declaration: None
    concerns: Callable[[Trial], bool] = lambda trial: True
    rank: int = 50


GROUPS = {
    "accuracy": "random problems over everything that the variant supports",
    "counting": "zero queries: every visible key weighs the same, so O and LSE count keys",
    "gather": "one key wins every row by 160 powers of two: O is a row of V, bit for bit",
    "poison": "NaN or huge values where no query looks",
    "refusal": "one argument just outside the declared support",
}


@cache
def oracles() -> tuple[Oracle, ...]:
    """All oracles, by group and rank."""
    found = []
    for info in pkgutil.iter_modules(__path__):
        oracle = getattr(importlib.import_module(f"{__name__}.{info.name}"), "ORACLE", None)
        if isinstance(oracle, Oracle):
            found.append(oracle)
    order = list(GROUPS)
    return tuple(sorted(found, key=lambda oracle: (order.index(oracle.group), oracle.rank, oracle.name)))


def of_group(group: str) -> tuple[Oracle, ...]:
    """The oracles of one group, by rank."""
    return tuple(oracle for oracle in oracles() if oracle.group == group)
