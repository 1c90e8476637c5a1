"""Events: what a campaign's journal says, as data.  `Leases.apply` gives them their meaning."""

from __future__ import annotations

import msgspec

from verify.campaign.leases.plan import Unit


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """The campaign was begun or continued.  asked: a hash of what the command asks."""

    asked: str
    seeds: tuple[int, ...]
    started: str


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """A first worker of this kind of device has said what it can be asked.

    sources: a hash of its kernels' sources, each as its variant declares it.
    """

    kind: str
    units: tuple[Unit, ...]
    sources: str


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """A worker has been admitted.  device: one GPU, or one worker of a CPU.  time: in seconds since
    the epoch."""

    worker: str
    kind: str
    device: str
    host: str = ""
    pid: int = 0
    time: float = 0.0


class Left(msgspec.Struct, frozen=True, tag="left"):
    """A worker is gone.  lost: whether what it had counts as an attempt (it was killed, or its
    machine was)."""

    worker: str
    lost: bool
    time: float = 0.0


class Given(msgspec.Struct, frozen=True, tag="given"):
    """A worker has got a lease."""

    lease: str
    worker: str


class Drawn(msgspec.Struct, frozen=True):
    """Problems drawn in a lease, and those that the support refused."""

    variant: str
    dtype: str
    group: str
    drawn: int
    refused: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A lease is done: its evidence is on disk already.

    seconds: from its begin to its end at the worker.  counts: whether it is the first time.
    """

    lease: str
    worker: str
    device: str
    seconds: float
    cases: int = 0
    failing: int = 0
    drawn: tuple[Drawn, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A worker could not do a lease, for a reason that is no verdict."""

    lease: str
    worker: str
    device: str
    message: str
    test: str = ""
    variant: str = ""


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """A worker gave a lease back unfinished: the campaign stops, and nothing is wrong with it."""

    lease: str
    worker: str


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """A lease is not given again: every attempt failed or took its worker with it."""

    lease: str
    message: str


class Controlled(msgspec.Struct, frozen=True, tag="controlled"):
    """The control problem was right on a device."""

    device: str
    seconds: float


class Quarantined(msgspec.Struct, frozen=True, tag="quarantined"):
    """A device is not to be trusted: it gets nothing more, and nothing that it did counts."""

    device: str
    reason: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A worker was not admitted, and why."""

    worker: str
    reason: str


Event = (
    Begun
    | Planned
    | Joined
    | Left
    | Given
    | Done
    | Failed
    | Returned
    | Broken
    | Controlled
    | Quarantined
    | Refused
)
