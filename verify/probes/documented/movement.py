"""Instructions that move data: ldmatrix, stmatrix, cp.async, shfl.sync, prmt."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from verify.probes.documented.states import LANES, Bytes, State, Trials, Words, blank, register

_SHARED = 4096  # bytes
_IGNORED = (3, 0xFFFFF000, 0x10000001)  # addresses that are not aligned, or in no shared memory
_X, _D = register("x[0]"), register("d[0]")

# "ldmatrix", "stmatrix": .m8n8, .b16.  Threads 8 i to 8 i + 7 have the addresses of matrix i's rows
# 0 to 7.  Of row r, thread 4 r + j holds elements 2 j and 2 j + 1, in register i, the first in its
# low half.  With .trans the matrix is loaded or stored in column-major format.


def _rows_of(trials: int, count: int, distinct: bool) -> NDArray[np.int64]:
    """Row addresses (trials, 8 count): in order, in reverse, then random."""
    random = np.random.default_rng(count)
    rows = _SHARED // 16
    drawn = [np.arange(8 * count), np.arange(8 * count)[::-1]]
    while len(drawn) < trials:
        drawn.append(random.choice(rows, 8 * count, replace=not distinct))
    return 16 * np.stack(drawn)


def _addressed(state: State, addresses: NDArray[np.int64], useless: bool) -> None:
    """Put the rows' addresses into the first lanes; into the others the same ones, in reverse, or
    useless ones."""
    count = addresses.shape[1]
    state.registers[:, :count, _X] = addresses
    for lane in range(count, LANES):
        other = _IGNORED[lane % len(_IGNORED)] if useless else addresses[:, -1 - lane % count]
        state.registers[:, lane, _X] = other


def elements_of(lane: int, transposed: bool) -> list[tuple[int, int]]:
    """(row, column) of the two elements that a lane's register holds."""
    pairs = [(lane // 4, lane % 4 * 2 + i) for i in (0, 1)]
    return [(column, row) for row, column in pairs] if transposed else pairs


def _named(trials: int, useless: bool) -> list[str]:
    names = ["rows in order", "rows in reverse", *(f"random rows {i}" for i in range(trials - 2))]
    return [f"{name}, useless addresses in other lanes" for name in names] if useless else names


def ldmatrix(count: int, transposed: bool, useless: bool = False) -> Trials:
    """Load `count` matrices from shared memory whose every element differs.

    useless: lanes whose address is ignored give one that is not aligned or in no shared memory.
    """
    trials = 10
    before = blank(trials, _SHARED)
    before.shared[:] = (np.arange(_SHARED // 2, dtype=np.uint16) + 0x1000).view(np.uint8)
    addresses = _rows_of(trials, count, distinct=False)
    _addressed(before, addresses, useless)
    after = before.copy()
    elements = before.shared.view(np.uint16)
    for matrix in range(count):
        for lane in range(LANES):
            word = np.zeros(trials, np.uint32)
            for half, (row, column) in enumerate(elements_of(lane, transposed)):
                at = addresses[:, 8 * matrix + row] // 2 + column
                word |= elements[np.arange(trials), at].astype(np.uint32) << (16 * half)
            after.registers[:, lane, _D + matrix] = word
    return Trials(_named(trials, useless), before, after)


def stmatrix(count: int, transposed: bool, useless: bool = False) -> Trials:
    """Store `count` matrices into rows that do not overlap; useless: see `ldmatrix`."""
    trials = 10
    before = blank(trials, _SHARED)
    numbers = np.arange(4 * LANES * 2, dtype=np.uint16).reshape(LANES, 4, 2) + 0x2000
    before.registers[:, :, _D : _D + 4] = numbers.view(np.uint32)[..., 0]
    addresses = _rows_of(trials, count, distinct=True)
    _addressed(before, addresses, useless)
    after = before.copy()
    elements = after.shared.view(np.uint16)
    for matrix in range(count):
        for lane in range(LANES):
            for half, (row, column) in enumerate(elements_of(lane, transposed)):
                at = addresses[:, 8 * matrix + row] // 2 + column
                elements[np.arange(trials), at] = numbers[lane, matrix, half]
    return Trials(_named(trials, useless), before, after)


# "cp.async": "Operand src-size represents the size of the data in bytes to be copied from src to
# dst and must be less than cp-size.  In such case, remaining bytes in destination dst are filled
# with zeros."  Kernels use src-size = cp-size too: all bytes are copied.


def _memory() -> Bytes:
    random = np.random.default_rng(7)
    return random.integers(1, 256, _SHARED, dtype=np.uint8)


def cp_async(size: int) -> Trials:
    """Copies of `size` bytes, with every src-size in every lane; places and sources at random."""
    trials, random, memory = size + 1, np.random.default_rng(size), _memory()
    before = blank(trials, LANES * 16)
    for trial in range(trials):
        lanes = np.arange(LANES)
        slots = random.permutation(LANES * 16 // size)[:LANES]
        sources = random.integers(0, _SHARED // size, LANES)
        sizes = (lanes + trial) % (size + 1)
        before.registers[trial, :, _X : _X + 3] = np.stack((slots * size, sources * size, sizes), 1)
    after = before.copy()
    for trial in range(trials):
        for to, source, wanted in before.registers[trial, :, _X : _X + 3].astype(np.int64):
            line = after.shared[trial, to : to + size]
            line[:wanted] = memory[source : source + wanted]
            line[wanted:] = 0
    names = [f"src-size (lane + {trial}) mod {size + 1}" for trial in range(trials)]
    return Trials(names, before, after, memory)


def cp_async_groups() -> Trials:
    """Groups of two copies, one, none and one: what is waited for has landed.

    cp.async.wait_group waits "till only N or fewer of the most recent cp.async-groups are pending
    and all the prior cp.async-groups committed by the executing threads are complete"; an empty
    group is a group.
    """
    trials, memory = 8, _memory()
    before = blank(trials, 2048)
    for trial in range(trials):
        order = np.random.default_rng(trial).permutation(LANES)
        before.registers[trial, :, _X] = 16 * order
        before.registers[trial, :, _X + 1] = 16 * (order[::-1] + LANES * (trial % 4))
    after = before.copy()
    for trial in range(trials):
        for lane in range(LANES):
            to, source = before.registers[trial, lane, _X : _X + 2].astype(np.int64)
            for copy in range(4):
                line = memory[source + 512 * copy : source + 512 * copy + 16]
                after.shared[trial, to + 512 * copy : to + 512 * copy + 16] = line
                after.registers[trial, lane, _D + copy] = line.view(np.uint32)[0]
    return Trials([f"places {trial}" for trial in range(trials)], before, after, memory)


# "shfl.sync": bval is b[4:0]; .bfly reads lane j = lane ^ bval, .idx reads lane
# j = minLane | (bval & ~segmask).  With c = 0x1f and every thread in membermask, minLane is 0 and
# ~segmask 0x1f: every j is in range.


def _choices(trials: int) -> Words:
    """b of each lane: the same 0 to 63 in all lanes, then random."""
    random = np.random.default_rng(5)
    same = np.broadcast_to(np.arange(64, dtype=np.uint32)[:, None], (64, LANES))
    mixed = random.integers(0, 64, (trials - 64, LANES), dtype=np.uint32)
    return np.concatenate((same, mixed))


def _shuffled(source: NDArray[np.int64], choices: Words) -> Trials:
    before = blank(len(choices))
    random = np.random.default_rng(6)  # any bits: NaN of fp32 among them
    before.registers[:, :, _X] = random.integers(0, 1 << 32, choices.shape, dtype=np.uint32)
    before.registers[:, 7, _X] = 0x7FA00001  # a signalling one
    before.registers[:, :, _X + 1] = choices
    after = before.copy()
    values = before.registers[:, :, _X]
    after.registers[:, :, _D] = np.take_along_axis(values, source, 1)
    names = [f"b = {trial}" if trial < 64 else "b at random" for trial in range(len(choices))]
    return Trials(names, before, after)


def shfl_bfly() -> Trials:
    """Every lane mask."""
    choices = _choices(80)
    return _shuffled(np.arange(LANES) ^ (choices.astype(np.int64) & 31), choices)


def shfl_idx() -> Trials:
    """Every lane from every lane."""
    choices = _choices(80)
    return _shuffled(choices.astype(np.int64) & 31, choices)


def prmt() -> Trials:
    """The default mode: selectors of every kind.

    "The bytes in the two source registers are numbered from 0 to 7: {b, a} = {{b7, b6, b5, b4},
    {b3, b2, b1, b0}}.  For each byte in the target register, a 4-bit selection value is defined.
    The 3 lsbs of the selection value specify which of the 8 source bytes should be moved; the msb
    defines if the byte value should be copied, or if the sign (msb of the byte) should be
    replicated over all 8 bits of the target position".
    """
    trials, random = 64, np.random.default_rng(8)
    before = blank(trials)
    before.registers[:, :, _X : _X + 2] = random.integers(0, 1 << 32, (trials, LANES, 2))
    before.registers[:, :, _X + 2] = random.integers(0, 1 << 16, (trials, LANES))
    before.registers[0, :, _X + 2] = 0x6420
    before.registers[1, :, _X + 2] = 0x7531
    after = before.copy()
    a, b, c = (before.registers[:, :, _X + i].astype(np.uint64) for i in range(3))
    source, result = b << np.uint64(32) | a, np.zeros_like(a)
    for i in range(4):
        choice = c >> np.uint64(4 * i) & np.uint64(15)
        byte = source >> np.uint64(8) * (choice & np.uint64(7)) & np.uint64(255)
        sign = np.where(byte >> np.uint64(7), np.uint64(255), np.uint64(0))
        result |= np.where(choice >> np.uint64(3), sign, byte) << np.uint64(8 * i)
    after.registers[:, :, _D] = result
    names = ["even bytes", "odd bytes", *(f"selectors {i}" for i in range(trials - 2))]
    return Trials(names, before, after)
