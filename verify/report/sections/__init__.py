"""Sections of the report, one file each.

A file that defines ORDER and `section(report, beside)` is found by itself; nothing else has to be
touched.  `register` adds a section from outside the tree.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache

from verify.document import Section
from verify.report.beside import Beside
from verify.report.schema import Report

# One section of a report, or None where there is nothing to say.  Beside: what lies in the folder.
Make = Callable[[Report, Beside], Section | None]

_registered: dict[Make, float] = {}


def register(make: Make, order: float = 1000.0) -> None:
    """Show that section in every report that this process renders, at that place among the
    others (their ORDERs); again: at another place."""
    _registered[make] = order


def unregister(make: Make) -> None:
    """Show it no longer."""
    _registered.pop(make, None)


@cache
def _own() -> dict[Make, float]:
    modules = (
        importlib.import_module(info.name)
        for info in pkgutil.iter_modules(__path__, f"{__name__}.")
    )
    return {module.section: module.ORDER for module in modules}


def sections(report: Report, beside: Beside) -> tuple[Section, ...]:
    """All sections that have something to say, in their order."""
    every = _own() | _registered
    made = (make(report, beside) for make in sorted(every, key=every.__getitem__))
    return tuple(section for section in made if section is not None)
