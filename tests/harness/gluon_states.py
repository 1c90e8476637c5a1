"""The states of the machine that `gluon_interleavings` has: what tuples are compared and hashed as,
of which a search holds tens of thousands."""

from __future__ import annotations

from typing import NamedTuple

from tests.harness.gluon_values import Name


class ProtocolError(Exception):
    """An order of events in which the program is wrong."""


class Barrier(NamedTuple):
    """whole: arrivals of a phase. phase: how many ended. seen, of its CTA: 1 after the leader's
    fence, 2 after a meeting. public, of the cluster: 1 once it is announced, 2 when the leader has
    arrived after that, 3 when somebody has waited for all."""

    whole: int
    pending: int
    missing: int = 0  # bytes
    phase: int = 0
    seen: int = 0
    public: int = 0
    alive: bool = True

    def after(self) -> Barrier:
        """The barrier after a change: in the next phase, if this one is complete."""
        if self.pending == 0 and self.missing == 0:
            return self._replace(pending=self.whole, phase=self.phase + 1)
        return self


class Tile(NamedTuple):
    """what: the operand and row that it holds. halves: those that still have to come. stores: by
    warp, 1 after a store, 2 after the fence behind it. issuer: the CTA that copies into it."""

    what: tuple[str, int]
    halves: int = 0
    barrier: Name = ("", 0)
    number: int = 0
    stores: tuple[int, ...] = ()
    issuer: int = 0
    unfenced: frozenset[int] = frozenset()  # warps whose stores no fence of the cluster has ordered


class State(NamedTuple):
    """Where each warp is, and what lies in shared memory: those of the first CTA first."""

    places: tuple[int, ...]
    barriers: tuple[tuple[Name, Barrier], ...] = ()
    tiles: tuple[tuple[Name, Tile], ...] = ()
