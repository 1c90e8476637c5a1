"""The barriers of the Gluon forward of 8-bit inputs, in every order of warps and arriving bytes."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
import torch

from tests.harness.gluon_host import Host
from tests.harness.gluon_interleavings import Program, ProtocolError
from tests.harness.gluon_values import NO_CLUSTER, Copied, Place
from tests.planted import gluon_fp8_forward
from verify.cuda.edits import Edit

torch.set_num_threads(1)


def host_of(*edits: Edit) -> Host:
    return Host(*edits, kernel="hopper_fp8_forward")


@cache
def host() -> Host:
    return host_of()


KEYS = 32  # of a block: the least that a tile of columns can have
ROWS = 2  # of the tile
DIM = 32


def program(
    made: Host, low: tuple[int, int], high: tuple[int, int], slots: int, *, even_first: bool
) -> Program:
    """What a program asks of the machine, of two rows that see keys [low, high)."""
    keys = max(*high, 1)
    descriptors = []
    boxes = {"q": (ROWS, DIM), "k": (KEYS, DIM), "v": (DIM, KEYS)}
    shapes = {"q": (ROWS, DIM), "k": (keys, DIM), "v": (DIM, keys)}
    for name, box in boxes.items():
        base = torch.ones(1, 1, *shapes[name], dtype=torch.float8_e4m3fn)
        shape, strides, block = list(base.shape), list(base.stride()), [1, 1, *box]
        if even_first and name == "k":
            shape[2:3], block[2:3] = [2, keys // 2], [2, KEYS // 2]
            strides[2:3] = [DIM, 2 * DIM]
        source = {"base": base, "shape": shape, "strides": strides, "layout": NO_CLUSTER}
        descriptors.append(Copied(name, SimpleNamespace(**source, block_shape=block)))
    tables = tuple(Place.of(torch.tensor([keys_], dtype=torch.int32)) for keys_ in (low, high))
    out = Place.of(torch.zeros(1, 1, ROWS, DIM, dtype=torch.bfloat16))
    arguments = [*descriptors, out, Place.of(torch.zeros(1, 1, ROWS)), tables, None, None]
    arguments += [1, 1, 1, 1, 1, 1, ROWS, keys, 0, 0, 1.0]
    blocks = {"BLOCK_M": ROWS, "BLOCK_N": KEYS, "BLOCK_D": DIM, "STAGES": slots}
    options = {"EVEN_FIRST": even_first, "KIND": "interval", "num_warps": 1}
    made.run(0, dict(enumerate(arguments)), {**blocks, **options})
    walk = [range(*row) for row in zip(low, high, strict=True)]
    blocks_seen = sorted({key // KEYS for row in walk for key in row})
    whole = [
        b for b in blocks_seen if all({*range(b * KEYS, b * KEYS + KEYS)} <= {*row} for row in walk)
    ]
    first = [b * KEYS for b in (*whole, *(b for b in blocks_seen if b not in whole))]
    wanted = {"q": [0] * len(first), "k": first, "v": first}
    return Program(list(made.machine.events), wanted)


WALKS = [((0, 0), (0, 0)), ((0, 0), (30, 32)), ((1, 32), (96, 90)), ((40, 70), (300, 240))]


def orders(high: tuple[int, int]) -> list[bool]:
    """Whether a tile of K can have its even rows first: as it is, and so of an even number."""
    return [False] if max(high) % 2 or not max(high) else [False, True]


@pytest.mark.parametrize("slots", range(1, 5))
def test_no_order_breaks_the_protocol(slots: int) -> None:
    for low, high in WALKS:
        for even_first in orders(high):
            program(host(), low, high, slots, even_first=even_first).check()


RACES = {
    "K without a wait": Edit(r"(?<!_)slot = await_tile\(k_here, t, STAGES\)", "slot = t % STAGES"),
    "V without a wait": Edit(
        r"last_slot = await_tile\(v_here, t - 1, STAGES\)", "last_slot = (t - 1) % STAGES"
    ),
    "the last V without a wait": Edit(
        r"await_tile\(v_here, total - 1, STAGES\)", "(total - 1) % STAGES"
    ),
    "no wait for O": Edit(r"(?m)^( {12}o = warpgroup_mma_)wait\(0,", r"\1wait(1,"),
    "no meeting before a refill": Edit(r"meet\(\)(?=  # every warp has read both tiles)", "pass"),
    "no fence behind hidden columns": Edit(
        r"fence_async_shared\(\)(?=  # wgmma and the copy engine)", "pass", 2
    ),
    "no arrival for tiles": Edit(r"mbarrier\.expect\([^\n]*", "pass"),
    "columns of the block behind": Edit(
        r"(?s)( {12}more = t - 1 \+ STAGES < total\n {12}fetch_columns\(v, [^\n]*\n)"
        r"( {12}ahead = [^\n]*\n)",
        r"\2\1",
    ),
}


def check_protocol(made: Host) -> None:
    """Raises ProtocolError if some walk shows a broken one."""
    for slots in (1, 2, 3):
        for low, high in WALKS:
            for even_first in orders(high):
                program(made, low, high, slots, even_first=even_first).check()


@pytest.mark.parametrize("race", RACES)
def test_a_broken_protocol_is_found(race: str) -> None:
    with pytest.raises(ProtocolError):
        check_protocol(host_of(RACES[race]))


@pytest.mark.parametrize("slip", ["missing-wait", "early-refill"])
def test_planted_races_are_found(slip: str) -> None:
    with pytest.raises(ProtocolError):
        check_protocol(host_of(*gluon_fp8_forward.SLIPS[slip].edits))
