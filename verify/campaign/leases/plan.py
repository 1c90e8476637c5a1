"""The plan of a campaign: units of work times seeds, per kind of device.  Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256

import msgspec


class Unit(msgspec.Struct, frozen=True):
    """One test of a campaign: one or several targets, or a check without any.

    node: pytest's name of it.  seeded: whether a seed changes what it asks; other units are given
    once.  family: the kernel file; a worker that has loaded it keeps to it.  seconds: how long it
    takes, roughly; 0 where nothing is known.
    """

    node: str
    seeded: bool = True
    family: str = ""
    seconds: float = 0.0


class Lease(msgspec.Struct, frozen=True):
    """A unit with one seed, for devices of one kind.

    kind: the slug of the device, as in reports.
    """

    kind: str
    unit: Unit
    seed: int

    @property
    def id(self) -> str:
        """16 hexadecimal digits, the same whenever the campaign is planned."""
        text = f"{self.kind}\n{self.unit.node}\n{self.seed}"
        return sha256(text.encode()).hexdigest()[:16]


def leases(kind: str, units: Iterable[Unit], seeds: Sequence[int]) -> list[Lease]:
    """All leases of one kind of device: long units first, then the first seed of every unit, then
    the second."""
    ordered = sorted(units, key=lambda unit: -unit.seconds)
    return [
        Lease(kind, unit, seed)
        for n, seed in enumerate(seeds)
        for unit in ordered
        if unit.seeded or n == 0
    ]


def digest(units: Iterable[Unit]) -> str:
    """One hash of what a kind of device is asked: workers of a kind must agree on it."""
    names = "\n".join(sorted(unit.node for unit in units))
    return sha256(names.encode()).hexdigest()[:12]
