"""The barriers of the Gluon kernel in every order of warps and copies, without a GPU.

The shipped texts run on the CPU (tests/harness/gluon_host.py) and say what each warp asks of
barriers, copies and tiles; tests/harness/gluon_interleavings.py tries all orders. Each of a list of
edits breaks the protocol in one place, and must be found.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from tests.harness.gluon_host import Host
from tests.harness.gluon_interleavings import Program, ProtocolError
from tests.harness.gluon_values import NO_CLUSTER, Copied, Place
from tests.planted import gluon_forward
from verify.cuda.edits import Edit

KEYS = 4  # of a block
ROWS = 2  # of the tile
DIM = 8
SLOTS = range(1, 5)
TILES = range(10)


@dataclass(frozen=True)
class Walk:
    """The keys [low, high) of both rows, and what follows: the blocks in the order in which the
    kernel must take them, those that both rows see whole before the others."""

    low: tuple[int, int]
    high: tuple[int, int]

    @property
    def blocks(self) -> list[int]:
        rows = [range(*row) for row in zip(self.low, self.high, strict=True)]
        seen = {key // KEYS for row in rows for key in row}
        found = range(min(seen, default=0), max(seen, default=-1) + 1)
        whole = [
            block
            for block in found
            if all(set(range(block * KEYS, block * KEYS + KEYS)) <= set(row) for row in rows)
        ]
        return whole + [block for block in found if block not in whole]


def walks(tiles: int) -> set[Walk]:
    """Walks over that many blocks: all inside, none, some; with a ragged end; not from key 0."""
    end = tiles * KEYS
    middle = tiles // 2 * KEYS
    found = {Walk((0, 0), (end, end)), Walk((0, middle), (end, middle))}
    if tiles:
        found |= {
            Walk((0, 0), (end - 1, end - 1)),
            Walk((0, min(KEYS, end)), (end, max(end - KEYS, 0))),
            Walk((1, KEYS), (end, end - 1)),
            Walk((3 * KEYS + 1,) * 2, (3 * KEYS + end,) * 2),
        }
    return found


def program(host: Host, walk: Walk, slots: int, **keywords: int) -> Program:
    """What one program of the kernel asks of the machine, with tiles of ROWS and KEYS rows."""
    low, high = (torch.tensor([keys], dtype=torch.int32) for keys in (walk.low, walk.high))
    keys = max(*walk.high, 1)
    given = []
    for name, rows, box in (("q", ROWS, ROWS), ("k", keys, KEYS), ("v", keys, KEYS)):
        base = torch.ones(1, 1, rows, DIM, dtype=torch.float16)
        source = {"base": base, "shape": base.shape, "strides": base.stride(), "layout": NO_CLUSTER}
        given.append(Copied(name, SimpleNamespace(**source, block_shape=[1, 1, box, DIM])))
    given.append(Place.of(torch.zeros(1, 1, ROWS, DIM, dtype=torch.float16)))
    given += [Place.of(torch.zeros(1, 1, ROWS)), (Place.of(low), Place.of(high))]
    given += [1, 1, 1, 1, 1, 1, ROWS, keys, 0, 0, 1.0]
    blocks = {"BLOCK_M": ROWS, "BLOCK_N": KEYS, "BLOCK_D": DIM, "STAGES": slots}
    host.run(0, dict(enumerate(given)), {**blocks, "KIND": "interval", "num_warps": 1})
    first = [block * KEYS for block in walk.blocks]
    wanted = {"q": [0] * len(first), "k": first, "v": first}
    return Program(list(host.machine.events), wanted, **keywords)


@cache
def shipped() -> Host:
    return Host()


@pytest.mark.first_look(1)
@pytest.mark.parametrize("slots", SLOTS)
def test_no_order_breaks_the_protocol(slots: int) -> None:
    """No tile is read before its bytes are there or overwritten before it is read, nothing waits
    for ever, and every barrier is initialised and invalidated once."""
    for tiles in TILES:
        for walk in walks(tiles):
            made = program(shipped(), walk, slots)
            assert len(walk.blocks) in (tiles, tiles + 1)
            made.check()
            assert made.states >= len(made.events)


def test_each_barrier_is_its_own() -> None:
    """One for Q, and one for every slot of K and of V."""
    for slots in SLOTS:
        events = program(shipped(), Walk((0, 0), (20, 20)), slots).events
        for kind in ("init", "invalidate"):
            named = [event.barrier for event in events if event.kind == kind]
            assert len(set(named)) == len(named) == 2 * slots + 1
        copies: dict[object, set[object]] = {}
        for event in events:
            if event.kind == "copy":
                copies.setdefault(event.barrier, set()).add(event.tiles)
        assert all(len(tiles) == 1 for tiles in copies.values())


def test_a_third_warp_changes_nothing() -> None:
    for slots in (1, 2):
        program(shipped(), Walk((1, 4), (12, 11)), slots, warps=3).check()


@pytest.mark.parametrize("slots", [1, 2])
def test_leaving_out_equivalent_orders_changes_no_verdict(slots: int) -> None:
    walk = Walk((0, 4), (12, 11))
    everything = program(shipped(), walk, slots, lazily=False)
    chosen = program(shipped(), walk, slots)
    everything.check()
    chosen.check()
    assert chosen.states < everything.states
    for name in (
        "no wait in the ring",
        "a phase too early",
        "the first K refilled while it is read",
    ):
        host = Host(*SLIPS[name][0])
        for lazily in (False, True):
            with pytest.raises(ProtocolError):
                program(host, walk, slots, lazily=lazily).check()


def drop(pattern: str, times: int = 1) -> list[Edit]:
    return [Edit(pattern, "pass", times)]


# What is changed, and what is then found.
SLIPS: dict[str, tuple[list[Edit], str]] = {
    "no wait in the ring": (drop(r"mbarrier\.wait\(barriers[^\n]*"), "holds .*nothing"),
    "no wait for Q": (drop(r"mbarrier\.wait\(q_here[^\n]*"), "while a copy into"),
    "a phase too early": (
        [Edit(r"\(tile // STAGES\) & 1", "(tile // STAGES + 1) & 1")],
        "holds .*nothing",
    ),
    "a phase per tile": ([Edit(r"\(tile // STAGES\) & 1", "tile & 1")], "deadlock|while a copy"),
    "always the first phase": (
        [Edit(r"\(tile // STAGES\) & 1", "0")],
        "deadlock|while a copy|holds",
    ),
    "no arrival": (drop(r"mbarrier\.expect\([^\n]*"), "deadlock"),
    "an arrival without a copy": (
        [Edit(r"(expect\([^\n]*), pred=pred\)", r"\1)")],
        "in a phase that has begun|more arrivals",
    ),
    "a copy without an arrival": (
        [Edit(r"(reshape\(tensor\.block_shape\)), pred=pred", r"\1")],
        "before a copy has come|deadlock|begun|into",
    ),
    "half the bytes": ([Edit(r"block_type\.nbytes", "block_type.nbytes // 2")], "has begun|holds"),
    "twice the bytes": ([Edit(r"block_type\.nbytes", "block_type.nbytes * 2")], "deadlock"),
    "two arrivals for a phase": ([Edit(r"count=1", "count=2")], "deadlock"),
    "barriers of Q not opened": (drop(r"open_ring\(q_here, 1\)"), "which is no barrier"),
    "barriers opened twice": (
        [Edit(r"open_ring\(v_here, STAGES\)", "open_ring(k_here, STAGES)")],
        "initialised twice",
    ),
    "barriers of V not closed": (drop(r"close_ring\(v_here, STAGES\)"), "never invalidated"),
    "barriers closed twice": (
        [Edit(r"close_ring\(v_here, STAGES\)", "close_ring(k_here, STAGES)")],
        "which is no barrier",
    ),
    "barriers closed too early": (
        [Edit(r"    m = gl\.full", "    close_ring(v_here, STAGES)\n    m = gl.full")],
        "invalidated|no barrier",
    ),
    "no fence after opening": (
        drop(r"(?<=STAGES\)\n    )fence_async_shared\(\)"),
        "before all see",
    ),
    "no meeting after opening": (
        [Edit(r"(    fence_async_shared\(\)\n)    meet\(\)\n(?=\n    batch32)", r"\1")],
        "before all see|no barrier then",
    ),
    "the first K refilled while it is read": (
        drop(r"meet\(\)(?=  # every warp has read the first tile of K)"),
        "which warp 1 reads|while a copy",
    ),
    "K and V refilled while they are read": (
        drop(r"meet\(\)(?=  # every warp has read both tiles)"),
        "which warp 1 reads|while a copy",
    ),
    "no meeting before the end": (
        drop(r"meet\(\)(?=  # no warp waits at a barrier any more)"),
        "invalidated|no barrier",
    ),
    "no wait for the first S": (
        [Edit(r"wait\(0, deps=\(s,\)\)", "wait(1, deps=(s,))")],
        "copy into .*, which warp",
    ),
    "no wait for O": (
        [Edit(r"wait\(0, deps=\(s, acc\)\)", "wait(1, deps=(s, acc))")],
        "into .*, which warp",
    ),
    "no wait for S and O": (
        [Edit(r"wait\(0, deps=\(s, acc\)\)", "wait(2, deps=(s, acc))")],
        "into .*, which warp",
    ),
    "one tile of K too many": (
        [Edit(r"t \+ STAGES < total", "t + STAGES <= total")],
        "before a copy has come|begun",
    ),
    "one tile of K too few": (
        [Edit(r"t \+ STAGES < total", "t + STAGES + 1 < total")],
        "deadlock",
    ),
    "one tile of V too many": (
        [Edit(r"t - 1 \+ STAGES < total", "t - 1 + STAGES <= total")],
        "before a copy has come|begun",
    ),
    "one tile of V too few": (
        [Edit(r"t - 1 \+ STAGES < total", "t + STAGES < total")],
        "deadlock",
    ),
    "a second tile of K where there is one": (
        [Edit(r"total > STAGES", "total >= STAGES")],
        "before a copy has come|begun",
    ),
    "P V with the values of the next block": (
        [
            Edit(
                r"last_slot = await_tile\(v_here, t - 1, STAGES\)",
                "last_slot = await_tile(v_here, t, STAGES)",
            )
        ],
        "deadlock|holds",
    ),
    "one tile too few at the start": (
        [Edit(r"stage < total", "stage + 1 < total", times=2)],
        "deadlock",
    ),
    "Q without a key": (
        [Edit(r"q_here\.index\(0\), q_tile, total > 0", "q_here.index(0), q_tile, True")],
        "before a copy has come|begun",
    ),
    "always the first slot": ([Edit(r"slot = tile % STAGES", "slot = 0")], "deadlock|holds"),
    "the tile after the next": (
        [Edit(r"nth_block\(walk, t - 1 \+ STAGES\)", "nth_block(walk, t + STAGES)")],
        "holds",
    ),
    "edges as if they were inside": (
        [Edit(r"block_at\(walk, t - inner, 1\)", "block_at(walk, t, 1)")],
        "holds",
    ),
    "no fence after hiding": (drop(r"fence_async_shared\(\)(?=  # wgmma and)"), "no fence"),
    "no meeting after hiding": (drop(r"(?<=these stores\n        )meet\(\)"), "no fence"),
}


def convicted(host: Host) -> str | None:
    """What the model finds in some small ring, or None."""
    for slots in (1, 2, 3):
        for tiles in (2, 5, 0):
            for walk in sorted(walks(tiles), key=lambda walk: (walk.low, walk.high)):
                try:
                    program(host, walk, slots).check()
                except ProtocolError as error:
                    return str(error)
    return None


@pytest.mark.parametrize("slip", SLIPS)
def test_a_broken_protocol_is_found(slip: str) -> None:
    edits, says = SLIPS[slip]
    found = convicted(Host(*edits))
    assert found is not None
    with pytest.raises(ProtocolError, match=says):
        raise ProtocolError(found)


@pytest.mark.parametrize("slip", ["missing-wait", "early-refill"])
def test_planted_races_are_found(slip: str) -> None:
    assert convicted(Host(*gluon_forward.SLIPS[slip].edits)) is not None


def test_the_model_knows_every_primitive_or_says_so() -> None:
    """One that it does not know is an error, and is never left out in silence."""
    with pytest.raises(AttributeError, match="no stand-in for 'arrive'"):
        program(Host(Edit(r"mbarrier\.expect\(", "mbarrier.arrive(")), Walk((0, 0), (4, 4)), 1)
    with pytest.raises(IndexError, match="has no place 2"):
        program(Host(Edit(r"slot = tile % STAGES", "slot = tile")), Walk((0, 0), (16, 16)), 2)
