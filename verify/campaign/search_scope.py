"""Search scope: what a process of a campaign over many machines knows of the lease it is at.

A search belongs to one lease: another seed of the same test is another search.  A failing example
is made smaller once, by the worker that found it first: the coordinator tells the others, which
leave it as it is.  A process without leases has one scope, and shrinks.  Imports nothing heavy.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

_lease = ""
_marker: Path | None = None


def begin(lease: str, folder: Path, test: str) -> None:
    """Begin a lease, which asks that test; `folder` is where `known` tells this process."""
    global _lease, _marker
    _lease = lease
    _marker = folder / _name(test)


def current() -> str:
    """The lease that this process is at; "" without leases."""
    return _lease


def shrinks() -> bool:
    """Whether this process makes a failing example of its test smaller."""
    return _marker is None or not _marker.exists()


def known(folder: Path, test: str) -> None:
    """Tell the process of that folder that another one has an example of that test."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _name(test)).touch()


def _name(test: str) -> str:
    return f"{sha256(test.encode()).hexdigest()[:16]}.known"
