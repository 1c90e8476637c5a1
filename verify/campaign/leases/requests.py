"""What a worker's session is asked and answers, one JSON object a line."""

from __future__ import annotations

from typing import Any

import msgspec

from verify.campaign.leases.plan import Unit


class Work(msgspec.Struct, frozen=True, tag="work"):
    """Run one test with one seed.  shrinks: whether a failing example is made smaller."""

    lease: str
    node: str
    seed: int
    shrinks: bool = True


class Check(msgspec.Struct, frozen=True, tag="check"):
    """Judge the control problem of this seed."""

    seed: int


Request = Work | Check


class Hello(msgspec.Struct, frozen=True):
    """What a session is, and what it can be asked.

    device: `verify.machine.device.fingerprint()`.  uuid: `verify.machine.device.own()`.  kernels: a
    hash of what their variants declare as their sources; sources: of the suite's files and of the
    files that the command names.  unusable: why no kernel file loads, or "".
    """

    device: dict[str, Any]
    uuid: str
    units: tuple[Unit, ...]
    kernels: str
    sources: str
    unusable: str = ""


class Answer(msgspec.Struct, frozen=True):
    """The end of a request.

    drawn: (variant, dtype, group, problems drawn, refused).  errors: (variant, test, message) of
    what is no verdict.  stopped: the campaign ends, and the test may be unfinished.  wrong: what
    the control problem found.
    """

    seconds: float = 0.0
    drawn: tuple[tuple[str, str, str, int, int], ...] = ()
    errors: tuple[tuple[str, str, str], ...] = ()
    stopped: bool = False
    wrong: str = ""
