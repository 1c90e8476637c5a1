"""mma.sync: which element of A, B, C and D each register of each lane holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verify.arithmetic.dtypes import DTYPES
from verify.probes.documented.states import (
    LANES,
    State,
    Trials,
    bits_of,
    blank,
    packed,
    register,
)

_C, _A, _B = register("x[0]"), register("d[0]"), register("e[0]")
_RANDOM = 16  # trials with integers at random in all three matrices
_CODES = np.array([(1 + i % 4 / 4) * 2.0 ** (i // 4) for i in range(32)])
"""32 values that every format has."""

# "Matrix Fragments for mma.m16n8k16 with floating point type" and "... for mma.m16n8k32":
# groupID = %laneid >> 2, threadID_in_group = %laneid % 4.


def of_a(lane: int, i: int, size: int) -> tuple[int, int]:
    """(row, column) of a_i."""
    group, thread = lane >> 2, lane % 4
    if size == 2:
        row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
        return row, thread * 2 + (i & 1) if i < 4 else thread * 2 + (i & 1) + 8
    row = group if 0 <= i < 4 or 8 <= i < 12 else group + 8
    return row, thread * 4 + (i & 3) if i < 8 else thread * 4 + (i & 3) + 16


def of_b(lane: int, i: int, size: int) -> tuple[int, int]:
    """(row, column) of b_i."""
    group, thread = lane >> 2, lane % 4
    if size == 2:
        return (thread * 2 + (i & 1) if i < 2 else thread * 2 + (i & 1) + 8), group
    return (thread * 4 + (i & 3) if i < 4 else thread * 4 + (i & 3) + 16), group


def of_c(lane: int, i: int) -> tuple[int, int]:
    """(row, column) of c_i and d_i."""
    group, thread = lane >> 2, lane % 4
    return group if i < 2 else group + 8, thread * 2 + (i & 1)


@dataclass(frozen=True)
class _Matrices:
    """a: (trials, 16, k).  b: (trials, k, 8).  c: (trials, 16, 8)."""

    names: list[str]
    a: NDArray[np.float64]
    b: NDArray[np.float64]
    c: NDArray[np.float64]


def mma(format: str, half: bool = False) -> Trials:
    """One-hot A with B of known rows or columns, the reverse, C alone, and products of integers.

    half: fp16 accumulators, of which a register holds two.
    """
    size = DTYPES[format].itemsize
    given = _drawn(format, size)
    before = blank(len(given.names))
    place_a = [[of_a(lane, i, size) for i in range(16 // size)] for lane in range(LANES)]
    place_b = [[of_b(lane, i, size) for i in range(8 // size)] for lane in range(LANES)]
    before.registers[:, :, _A : _A + 4] = packed(
        _taken(bits_of(given.a, format), place_a), 8 * size
    )
    before.registers[:, :, _B : _B + 2] = packed(
        _taken(bits_of(given.b, format), place_b), 8 * size
    )
    _put_sums(before, given.c, half)
    after = before.copy()
    _put_sums(after, given.a @ given.b + given.c, half)
    return Trials(given.names, before, after)


def _taken(matrix: NDArray[np.uint32], places: list[list[tuple[int, int]]]) -> NDArray[np.uint32]:
    """The elements at those places: (trials, lanes, elements)."""
    rows, columns = np.moveaxis(np.array(places), 2, 0)
    return matrix[:, rows, columns]


def _put_sums(state: State, sums: NDArray[np.float64], half: bool) -> None:
    places = [[of_c(lane, i) for i in range(4)] for lane in range(LANES)]
    elements = _taken(bits_of(sums, "float16" if half else "float32"), places)
    words = packed(elements, 16 if half else 32)
    state.registers[:, :, _C : _C + words.shape[-1]] = words


def _drawn(format: str, size: int) -> _Matrices:
    depth = 32 // size
    by_k, by_row, by_column = _CODES[:depth], _CODES[:16], _CODES[:8]
    names: list[str] = []
    parts: list[tuple[NDArray[np.float64], ...]] = []

    def hot(name: str, rows: int, columns: int) -> NDArray[np.float64]:
        """Each element alone, in the order of rows."""
        names.extend(f"{name}[{row}][{column}]" for row in range(rows) for column in range(columns))
        return np.eye(rows * columns).reshape(-1, rows, columns)

    def add(a: NDArray[np.float64], b: NDArray[np.float64], c: NDArray[np.float64]) -> None:
        count = max(len(a), len(b))
        shapes = (count, 16, depth), (count, depth, 8), (count, 16, 8)
        matrices = zip((a, b, c), shapes, strict=True)
        parts.append(tuple(np.broadcast_to(x, shape) for x, shape in matrices))

    none = np.zeros((1, 1, 1))
    add(hot("B by rows, 1 at A", 16, depth), by_k[None, :, None], none)
    add(hot("B by columns, 1 at A", 16, depth), by_column[None, None], none)
    add(by_k[None, None], hot("A by columns, 1 at B", depth, 8), none)
    add(by_row[None, :, None], hot("A by rows, 1 at B", depth, 8), none)
    names.append("C alone")
    add(none, none, (np.arange(128.0) + 1).reshape(1, 16, 8))
    random = np.random.default_rng(len(format))
    names.extend(f"integers {i}" for i in range(_RANDOM))
    a, b, c = (
        random.integers(-3, 4, (_RANDOM, *shape)).astype(np.float64)
        for shape in ((16, depth), (depth, 8), (16, 8))
    )
    add(a, b, c)
    return _Matrices(names, *(np.concatenate(matrices) for matrices in zip(*parts, strict=True)))
