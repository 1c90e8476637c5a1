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
- Of a cluster: one copy can write into several CTAs, and each part has a barrier and bytes of its
  own, in the CTA that it reaches. A warp that waits at the barrier of the cluster goes on when all
  warps of all CTAs that have not left have arrived as often as it. Another CTA's copy comes after a
  fence of the cluster by each warp that has stored into the tile. A CTA leaves no earlier than the
  copies that it has begun, and those into its tiles, have come.

The orders of events that do not touch the same barrier or tile are equivalent. So the bytes of a
copy come only where some warp is about to touch its barrier or its tile: both orders are tried
there. `lazily=False` tries all of them everywhere.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate

from tests.harness.gluon_states import Barrier, ProtocolError, State, Tile
from tests.harness.gluon_values import Event, Name

MOST_BYTES = 2**20 - 1  # of a phase: the range of an mbarrier's tx-count
HALVES = 2


@dataclass
class Program:
    """The events of the leading warp of a CTA and of the others.

    rows: by operand, the first row of each tile that wgmma must read, in this order.
    warps: of each CTA.  halves: how many parts a copy's bytes come in.  absent: CTAs that run no
    event of these kinds.
    """

    events: Sequence[Event]
    rows: dict[str, list[int]]
    warps: int = 2
    lazily: bool = True
    ctas: int = 1
    halves: int = HALVES
    absent: dict[int, tuple[str, ...]] = field(default_factory=dict)
    states: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.programs = [
            list(self._program(cta, leads=warp == 0))
            for cta in range(self.ctas)
            for warp in range(self.warps)
        ]
        self.threads = range(len(self.programs))
        everything = [event for events in self.programs for event in events]
        operands = {event.tiles[0][0]: event.what[0] for event in everything if event.what[0]}
        self.wanted = [list(_wanted(events, operands, self.rows)) for events in self.programs]
        self.reading = [list(_reading(events)) for events in self.programs]
        self.arrivals = [_counts(events, "arrive") for events in self.programs]
        self.awaited = [_counts(events, "await") for events in self.programs]

    def _program(self, cta: int, leads: bool) -> Iterator[Event]:
        """The events of a warp, each with the names of the CTA that it touches."""
        for event in self.events:
            if (event.leader and not leads) or event.kind in self.absent.get(cta, ()):
                continue
            if not event.ctas:
                yield self._placed(event, cta)
            elif cta == event.ctas[0]:
                yield from (self._placed(event, other) for other in event.ctas)

    def _placed(self, event: Event, cta: int) -> Event:
        def of(name: Name) -> Name:
            return (f"CTA {cta}, {name[0]}", name[1]) if self.ctas > 1 else name

        barrier = None if event.barrier is None else of(event.barrier)
        return replace(event, barrier=barrier, tiles=tuple(map(of, event.tiles)))

    def _arrived(self, state: State, name: Name, tile: Tile) -> State:
        """The state after half the bytes of a copy."""
        barriers, tiles = dict(state.barriers), dict(state.tiles)
        tiles[name] = tile._replace(halves=tile.halves - 1)
        barrier = barriers[tile.barrier]
        missing = barrier.missing - tile.number // self.halves
        barriers[tile.barrier] = barrier._replace(missing=missing).after()
        return State(state.places, tuple(barriers.items()), tuple(tiles.items()))

    def _near(self, warp: int, name: Name) -> bool:
        """Whether a barrier or a tile lies in the CTA of that warp."""
        return self.ctas == 1 or name[0].startswith(f"CTA {warp // self.warps},")

    def _left(self, state: State, cta: int) -> bool:
        """Whether all warps of a CTA have come to their end."""
        own = range(cta * self.warps, (cta + 1) * self.warps)
        return all(self._next(state, warp) is None for warp in own)

    def check(self) -> None:
        """Try every order. Raises ProtocolError."""
        with _uncollected():
            self._check()

    def _check(self) -> None:
        start = State((0,) * len(self.threads))
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
        upcoming = [self._next(state, warp) for warp in self.threads]
        for warp, event in enumerate(upcoming):
            if event is None:
                continue
            # One of these changes nothing for the others, early or late.
            if event.kind in ("arrive", "await"):
                after = self._at_the_cluster(state, warp, event)
                if after is not None:
                    yield after
                    return
            elif event.kind in ("init", "announce") and self.ctas > 1:
                yield from self._step(state, warp, event)
                return
        for cta in range(self.ctas):
            own = range(cta * self.warps, (cta + 1) * self.warps)
            if all(
                event is not None and event.kind == "meet"
                for event in upcoming[own.start : own.stop]
            ):
                yield self._meet(state, own)
                return
        for warp, event in enumerate(upcoming):
            if event is not None and event.kind not in ("meet", "arrive", "await"):
                yield from self._step(state, warp, event)
        touched = {event.barrier for event in upcoming if event is not None}
        touched |= {name for event in upcoming if event is not None for name in event.tiles}
        for name, tile in state.tiles:
            if tile.halves and (not self.lazily or touched & {name, tile.barrier}):
                yield self._arrived(state, name, tile)

    def _end(self, state: State) -> None:
        for warp in self.threads:
            event = self._next(state, warp)
            if event is not None:
                raise ProtocolError(f"deadlock: warp {warp} waits for ever at {event}")
        left = [name for name, barrier in state.barriers if barrier.alive]
        if left:
            raise ProtocolError(f"never invalidated: {left}")

    def _meet(self, state: State, warps: range) -> State:
        """The state after a meeting of the warps of a CTA."""
        places = tuple(place + (warp in warps) for warp, place in enumerate(state.places))
        barriers = tuple(
            (name, b._replace(seen=2) if b.seen == 1 and self._near(warps.start, name) else b)
            for name, b in state.barriers
        )
        tiles = tuple(
            (
                name,
                t._replace(
                    stores=tuple(0 if s == 2 and w in warps else s for w, s in enumerate(t.stores)),
                )
                if 2 in t.stores
                else t,
            )
            for name, t in state.tiles
        )
        return State(places, barriers, tiles)

    def _at_the_cluster(self, state: State, warp: int, event: Event) -> State | None:
        """The state after an arrival at the cluster's barrier or a wait there, None if it goes on
        waiting.  Raises ProtocolError."""
        place = state.places[warp]
        arrived, waited = self.arrivals[warp][place], self.awaited[warp][place]
        barriers = state.barriers
        if event.kind == "arrive" and arrived != waited:
            raise ProtocolError(f"warp {warp} arrives twice at the cluster's barrier")
        if event.kind == "await":
            if arrived == waited:
                raise ProtocolError(f"warp {warp} waits for the cluster and has not arrived")
            for other in self.threads:
                there = self.arrivals[other][state.places[other]] > waited
                if not there and not self._left(state, other // self.warps):
                    return None
            barriers = tuple((n, b._replace(public=3) if b.public == 2 else b) for n, b in barriers)
        elif warp % self.warps == 0:
            barriers = tuple(
                (n, b._replace(public=2) if b.public == 1 and self._near(warp, n) else b)
                for n, b in barriers
            )
        places = (*state.places[:warp], place + 1, *state.places[warp + 1 :])
        return self._checked(State(places, barriers, state.tiles), warp)

    def _checked(self, state: State, warp: int) -> State:
        """The state after a step of a warp.  Raises ProtocolError if its CTA leaves too early."""
        cta = warp // self.warps
        if self.ctas > 1 and self._left(state, cta):
            for name, tile in state.tiles:
                if tile.halves and (self._near(warp, name) or tile.issuer == cta):
                    raise ProtocolError(f"CTA {cta} leaves while a copy into {name} is under way")
        return state

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
            if not self._sees(warp, name, barrier, event.kind):
                raise ProtocolError(f"{event.kind} at {name} before all see its initialisation")
            if event.kind == "wait" and barrier.phase % 2 == event.number:
                return  # it has not ended
            barriers[name] = _signalled(event, barrier, tiles)
        if event.kind == "fence":
            tiles = {key: _fenced(tile, warp) for key, tile in tiles.items()}
            if event.number:
                tiles = {
                    key: t._replace(unfenced=t.unfenced - {warp}) if warp in t.unfenced else t
                    for key, t in tiles.items()
                }
        if event.kind == "announce" or (event.kind == "fence" and warp % self.warps == 0):
            for key, known in barriers.items():
                if self._near(warp, key):
                    public = max(known.public, int(event.kind == "announce"))
                    if known.seen < 1 or public != known.public:
                        barriers[key] = known._replace(seen=max(known.seen, 1), public=public)
        self._touch(state, warp, event, tiles)
        places = (*state.places[:warp], place + 1, *state.places[warp + 1 :])
        yield self._checked(State(places, tuple(barriers.items()), tuple(tiles.items())), warp)

    def _sees(self, warp: int, name: Name, barrier: Barrier, kind: str) -> bool:
        """Whether a warp, or the copy that it begins, can know that the barrier is initialised."""
        if barrier.public == 3 or not self._near(warp, name):
            return barrier.public == 3
        leads = warp % self.warps == 0
        return barrier.seen >= (2 if not leads else 1 if kind == "copy" else 0)

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
                for other in self.threads:
                    if name in self.reading[other][state.places[other]]:
                        raise ProtocolError(f"{event.kind} into {name}, which warp {other} reads")
            elif held.what != what:
                raise ProtocolError(f"{event.kind} of {what} where {name} holds {held.what}")
            if event.kind == "copy":
                assert event.barrier is not None
                if held.unfenced and not self._near(warp, name):
                    raise ProtocolError(f"a copy into {name}, whose stores its CTA has not fenced")
                stores = (0,) * len(self.threads)
                issuer = warp // self.warps
                tiles[name] = Tile(
                    event.what, self.halves, event.barrier, event.number, stores, issuer
                )
            elif event.kind == "store":
                stores = (*held.stores[:warp], 1, *held.stores[warp + 1 :])
                tiles[name] = held._replace(stores=stores, unfenced=held.unfenced | {warp})


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collections: states are many and in no circle, and the collector would go
    through all of them time and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _signalled(event: Event, barrier: Barrier, tiles: dict[Name, Tile]) -> Barrier:
    """The barrier after an event at it. Raises ProtocolError."""
    name = event.barrier
    if event.kind == "expect":
        if barrier.pending == 0:
            raise ProtocolError(f"{name}: more arrivals in a phase than its count")
        missing = barrier.missing + event.number
        if missing > MOST_BYTES:
            raise ProtocolError(f"{name}: {missing} bytes in a phase")
        return barrier._replace(pending=barrier.pending - 1, missing=missing).after()
    if event.kind == "invalidate":
        if barrier.pending != barrier.whole or barrier.missing:
            raise ProtocolError(f"{name} is invalidated in a phase that has begun")
        if any(tile.halves and tile.barrier == name for tile in tiles.values()):
            raise ProtocolError(f"{name} is invalidated before a copy has come")
        return barrier._replace(alive=False)
    return barrier


def _fenced(tile: Tile, warp: int) -> Tile:
    if 1 not in tile.stores[warp : warp + 1]:
        return tile
    stores = tuple(2 if at == warp and s == 1 else s for at, s in enumerate(tile.stores))
    return tile._replace(stores=stores)


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


def _counts(events: Sequence[Event], kind: str) -> list[int]:
    """Before each event, and at the end: how many of that kind there were."""
    return list(accumulate((event.kind == kind for event in events), initial=0))
