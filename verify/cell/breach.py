"""What a kernel process raises where a kernel breaks the interface."""

from __future__ import annotations


class Breach(Exception):  # noqa: N818 - a verdict, not an error of ours
    """The kernel broke the interface: wrong shape, dtype, device or type, or an output that is an
    input."""


class Undeclared(Breach):
    """A file declares no variant, and has no function that could be one."""
