"""Packages that only some commands need: the distribution's extras, and what to install where one
of them is missing."""

from __future__ import annotations

import importlib.util
import re

EXTRAS = {"triton": "triton", "matplotlib": "report", "cuda": "cuda", "distributed": "campaign"}
"""The extra that brings a top-level module."""

_NO_MODULE = re.compile(r"No module named '(\w+)")
_HEADERS = re.compile(r"no (CuTe|CCCL) headers\b")
_SET_UP = "`verify setup cute` installs them"


class MissingPackageError(ImportError):
    """A package of an extra is not installed; the message says in one line what to install."""


def lacking(module: str) -> str | None:
    """What to install for a module of EXTRAS, in one line, or None if it is there."""
    if importlib.util.find_spec(module) is not None:
        return None
    return f"{module} is not installed: pip install 'attention-verify[{EXTRAS[module]}]'"


def need(module: str) -> None:
    """Raise MissingPackageError if a module of EXTRAS is not there."""
    said = lacking(module)
    if said is not None:
        raise MissingPackageError(said)


def lacked_by(error: str) -> str | None:
    """What to install, if an error's text says that a module of EXTRAS was not found, and it is not
    here; else None.

    The text can be a kernel's, which may say anything: whether the module is here is looked up.
    """
    found = _NO_MODULE.search(error)
    return lacking(found[1]) if found is not None and found[1] in EXTRAS else None


def advised(reason: str | None) -> str | None:
    """The reason why a kernel cannot run or be compiled, with what to install against it."""
    if reason is None:
        return None
    if _HEADERS.search(reason):
        return f"{reason} ({_SET_UP})"
    said = lacked_by(reason)
    return reason if said is None else f"{reason} ({said})"
