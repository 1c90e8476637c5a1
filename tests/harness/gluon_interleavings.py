"""Every order in which warps and the copy engine can run a Gluon program (see `gluon_host`).

The machine, after the PTX ISA (mbarrier, cp.async.bulk.tensor, wgmma, proxies):

- A barrier counts the arrivals and the bytes that its phase still lacks. The phase ends when both
  are zero, and the next one begins. A wait for a parity goes on when the phase of that parity has
  ended: when the current one has the other.
- A copy owns its tile from its issue until its last bytes have come. Bytes come in two halves, at
  any time, in any order among copies.
- wgmma owns its operands from its issue until a wait for it, in each warp.
- Stores of threads, and a barrier's initialisation, are seen by the copy engine and by wgmma after
  a fence of the storing thread and a meeting of all warps.

The orders of events that do not touch the same barrier or tile are equivalent. So the bytes of a
copy come only where some warp is about to touch its barrier or its tile: both orders are tried
there. `lazily=False` tries all of them everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from tests.harness.gluon_host import Event, Name

MOST_BYTES = 2**20 - 1  # of a phase: the range of an mbarrier's tx-count
HALVES = 2


class ProtocolError(Exception):
    """An order of events in which the program is wrong."""


@dataclass(frozen=True)
class Barrier:
    """phase: how many have ended. seen: 1 after the leader's fence, 2 after a meeting."""

    count: int
    pending: int
    missing: int = 0  # bytes
    phase: int = 0
    seen: int = 0
    alive: bool = True

    def after(self) -> Barrier:
        """The barrier after a change: in the next phase, if this one is complete."""
        if self.pending == 0 and self.missing == 0:
            return replace(self, pending=self.count, phase=self.phase + 1)
        return self


@dataclass(frozen=True)
class Tile:
    """what: the operand and row that it holds. halves: those that still have to come. stores: by
    warp, 1 after a store, 2 after the fence behind it."""

    what: tuple[str, int]
    halves: int = 0
    barrier: Name = ("", 0)
    number: int = 0
    stores: tuple[int, ...] = ()


@dataclass(frozen=True)
class State:
    """Where each warp is, and what lies in shared memory."""

    places: tuple[int, ...]
    barriers: tuple[tuple[Name, Barrier], ...] = ()
    tiles: tuple[tuple[Name, Tile], ...] = ()


@dataclass
class Program:
    """The events of the leading warp and of the others.

    rows: by operand, the first row of each tile that wgmma must read, in this order.
    """

    events: Sequence[Event]
    rows: dict[str, list[int]]
    warps: int = 2
    lazily: bool = True
    states: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        others = [event for event in self.events if not event.leader]
        self.programs = [list(self.events), *[others] * (self.warps - 1)]
        operands = {event.tiles[0][0]: event.what[0] for event in self.events if event.what[0]}
        self.wanted = [list(_wanted(events, operands, self.rows)) for events in self.programs]
        self.reading = [list(_reading(events)) for events in self.programs]

    def check(self) -> None:
        """Try every order. Raises ProtocolError."""
        start = State((0,) * self.warps)
        seen = {start}
        pending = [start]
        while pending:
            state = pending.pop()
            following = list(self._after(state))
            if not following:
                self._end(state)
            for after in following:
                if after not in seen:
                    seen.add(after)
                    pending.append(after)
        self.states = len(seen)

    def _next(self, state: State, warp: int) -> Event | None:
        events, place = self.programs[warp], state.places[warp]
        return events[place] if place < len(events) else None

    def _after(self, state: State) -> Iterator[State]:
        upcoming = [self._next(state, warp) for warp in range(self.warps)]
        if all(event is not None and event.kind == "meet" for event in upcoming):
            yield self._meet(state)
            return
        for warp, event in enumerate(upcoming):
            if event is not None and event.kind != "meet":
                yield from self._step(state, warp, event)
        touched = {event.barrier for event in upcoming if event is not None}
        touched |= {name for event in upcoming if event is not None for name in event.tiles}
        for name, tile in state.tiles:
            if tile.halves and (not self.lazily or touched & {name, tile.barrier}):
                yield _arrived(state, name, tile)

    def _end(self, state: State) -> None:
        for warp in range(self.warps):
            event = self._next(state, warp)
            if event is not None:
                raise ProtocolError(f"deadlock: warp {warp} waits for ever at {event}")
        left = [name for name, barrier in state.barriers if barrier.alive]
        if left:
            raise ProtocolError(f"never invalidated: {left}")

    def _meet(self, state: State) -> State:
        places = tuple(place + 1 for place in state.places)
        barriers = tuple(
            (name, replace(b, seen=2) if b.seen == 1 else b) for name, b in state.barriers
        )
        tiles = tuple(
            (name, replace(t, stores=tuple(0 if s == 2 else s for s in t.stores)))
            for name, t in state.tiles
        )
        return State(places, barriers, tiles)

    def _step(self, state: State, warp: int, event: Event) -> Iterator[State]:
        """The state after that event, if the warp goes on. Raises ProtocolError."""
        place = state.places[warp]
        barriers, tiles = dict(state.barriers), dict(state.tiles)
        name = event.barrier
        if event.kind == "init":
            if name in barriers:
                raise ProtocolError(f"{name} is initialised twice")
            barriers[name] = Barrier(event.number, event.number)
        elif name is not None:
            barrier = barriers.get(name)
            if barrier is None or not barrier.alive:
                raise ProtocolError(f"{event.kind} at {name}, which is no barrier then")
            if barrier.seen < (2 if warp else 1 if event.kind == "copy" else 0):
                raise ProtocolError(f"{event.kind} at {name} before all see its initialisation")
            if event.kind == "wait" and barrier.phase % 2 == event.number:
                return  # it has not ended
            barriers[name] = _signalled(event, barrier, tiles)
        if event.kind == "fence":
            tiles = {key: _fenced(tile, warp) for key, tile in tiles.items()}
            if warp == 0:
                barriers = {key: replace(b, seen=max(b.seen, 1)) for key, b in barriers.items()}
        self._touch(state, warp, event, tiles)
        places = (*state.places[:warp], place + 1, *state.places[warp + 1 :])
        yield State(places, tuple(barriers.items()), tuple(tiles.items()))

    def _touch(self, state: State, warp: int, event: Event, tiles: dict[Name, Tile]) -> None:
        """What an event does to its tiles. Raises ProtocolError."""
        wanted = self.wanted[warp][state.places[warp]]
        for name, what in zip(event.tiles, wanted, strict=True):
            held = tiles.get(name, Tile(("nothing", 0)))
            if held.halves:
                raise ProtocolError(f"{event.kind} of {what} while a copy into {name} is under way")
            if any(held.stores) and event.kind not in ("load", "store"):
                raise ProtocolError(f"{event.kind} of {name}, whose stores no fence has ordered")
            if event.kind in ("copy", "store"):
                for other in range(self.warps):
                    if name in self.reading[other][state.places[other]]:
                        raise ProtocolError(f"{event.kind} into {name}, which warp {other} reads")
            elif held.what != what:
                raise ProtocolError(f"{event.kind} of {what} where {name} holds {held.what}")
            if event.kind == "copy":
                assert event.barrier is not None
                stores = (0,) * self.warps
                tiles[name] = Tile(event.what, HALVES, event.barrier, event.number, stores)
            elif event.kind == "store":
                stores = (*held.stores[:warp], 1, *held.stores[warp + 1 :])
                tiles[name] = replace(held, stores=stores)


def _signalled(event: Event, barrier: Barrier, tiles: dict[Name, Tile]) -> Barrier:
    """The barrier after an event at it. Raises ProtocolError."""
    name = event.barrier
    if event.kind == "expect":
        if barrier.pending == 0:
            raise ProtocolError(f"{name}: more arrivals in a phase than its count")
        missing = barrier.missing + event.number
        if missing > MOST_BYTES:
            raise ProtocolError(f"{name}: {missing} bytes in a phase")
        return replace(barrier, pending=barrier.pending - 1, missing=missing).after()
    if event.kind == "invalidate":
        if barrier.pending != barrier.count or barrier.missing:
            raise ProtocolError(f"{name} is invalidated in a phase that has begun")
        if any(tile.halves and tile.barrier == name for tile in tiles.values()):
            raise ProtocolError(f"{name} is invalidated before a copy has come")
        return replace(barrier, alive=False)
    return barrier


def _arrived(state: State, name: Name, tile: Tile) -> State:
    """The state after half the bytes of a copy."""
    barriers, tiles = dict(state.barriers), dict(state.tiles)
    tiles[name] = replace(tile, halves=tile.halves - 1)
    barrier = barriers[tile.barrier]
    missing = barrier.missing - tile.number // HALVES
    barriers[tile.barrier] = replace(barrier, missing=missing).after()
    return State(state.places, tuple(barriers.items()), tuple(tiles.items()))


def _fenced(tile: Tile, warp: int) -> Tile:
    stores = tuple(2 if at == warp and s == 1 else s for at, s in enumerate(tile.stores))
    return replace(tile, stores=stores)


def _reading(events: Sequence[Event]) -> Iterator[frozenset[Name]]:
    """Before each event, and at the end: the tiles that wgmma of this warp are reading."""
    under_way: list[tuple[Name, ...]] = []
    for event in events:
        yield frozenset(name for tiles in under_way for name in tiles)
        if event.kind == "wgmma":
            under_way.append(event.tiles)
        elif event.kind == "done":
            under_way = under_way[len(under_way) - event.number :] if event.number else []
    yield frozenset(name for tiles in under_way for name in tiles)


def _wanted(
    events: Sequence[Event], operands: dict[str, str], rows: dict[str, list[int]]
) -> Iterator[list[tuple[str, int]]]:
    """For each event, what its tiles must hold: the next rows of their operands."""
    read = dict.fromkeys(rows, 0)
    for event in events:
        names = [operands.get(array, "nothing") for array, _ in event.tiles]
        yield [
            event.what
            if event.kind == "copy"
            else (
                name,
                rows[name][read[name]] if read.get(name, 0) < len(rows.get(name, [])) else -1,
            )
            for name in names
        ]
        if event.kind == "wgmma":
            for name in names:
                read[name] = read.get(name, 0) + 1
