"""docs/ptx.md draws the lane maps that the probes expect; its recipes give what they promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pytest

from verify.arithmetic.archs import arch_of
from verify.bundle import ROOT
from verify.probes.conformance import CONFORMING
from verify.probes.documented.movement import elements_of
from verify.probes.documented.products import of_a, of_b, of_c

Place = tuple[int, int]
Registers = dict[Place, tuple[Place, ...]]  # (lane, register) -> elements, the lowest first
LANES = range(32)


@cache
def doc() -> str:
    return (ROOT / "docs" / "ptx.md").read_text(encoding="utf-8")


def drawing(cells: Mapping[Place, str], rows: int, columns: int) -> str:
    """One line per row, its cells side by side."""
    lines = []
    for row in range(rows):
        parts = " ".join(f"{cells[row, column]:>6}" for column in range(columns))
        lines.append(f"{row:>4}  {parts}".rstrip())
    return "\n".join(lines)


def registers(of: Callable[[int, int, int], Place], elements: int, size: int) -> Registers:
    """The elements of every register, by the manual's numbering."""
    each = 4 // size
    found: Registers = {}
    for lane in LANES:
        places = [of(lane, i, size) for i in range(elements // size)]
        for register in range(len(places) // each):
            found[lane, register] = tuple(places[each * register : each * (register + 1)])
    return found


A = {size: registers(of_a, 16, size) for size in (1, 2)}
B = {size: registers(of_b, 8, size) for size in (1, 2)}
C = {(lane, i): of_c(lane, i) for lane in LANES for i in range(4)}


@pytest.mark.parametrize("size", [1, 2])
def test_the_drawings_of_a_and_b(size: int) -> None:
    each = 4 // size
    cells_a, cells_b = {}, {}
    for (lane, register), places in A[size].items():
        ((row, column), *_) = places
        assert places == tuple((row, column + i) for i in range(each))
        cells_a[row, column // each] = f"{lane}:a{register}"
    for (lane, register), places in B[size].items():
        ((row, column), *_) = places
        assert places == tuple((row + i, column) for i in range(each))
        cells_b[row // each, column] = f"{lane}:b{register}"
    assert drawing(cells_a, 16, 8) in doc()
    assert drawing(cells_b, 8, 8) in doc()


def test_the_drawing_of_c() -> None:
    assert drawing({place: f"{lane}:c{i}" for (lane, i), place in C.items()}, 16, 8) in doc()


@pytest.mark.parametrize("transposed", [False, True])
def test_the_drawing_of_a_matrix(transposed: bool) -> None:
    cells = {
        place: f"{lane}.{'lh'[half]}"
        for lane in LANES
        for half, place in enumerate(elements_of(lane, transposed))
    }
    assert drawing(cells, 8, 8) in doc()


def test_the_table_of_instructions() -> None:
    for one in CONFORMING:
        row = f"| `{one.name}` | `{one.function}` | {arch_of(one.capability).name} |"
        assert row.replace(", special values", "") in doc()


def loaded(row_of: Callable[[int], Place], transposed: bool) -> Registers:
    """What ldmatrix.x4 leaves of a tile of 16-bit elements; row_of: a lane's row and first
    column."""
    found: Registers = {}
    for matrix in range(4):
        for lane in LANES:
            places = []
            for row, column in elements_of(lane, transposed):
                first, start = row_of(8 * matrix + row)
                places.append((first, start + column))
            found[lane, matrix] = tuple(places)
    return found


def test_rows_of_a_tile_load_as_a() -> None:
    assert loaded(lambda lane: (lane % 16, lane // 16 * 8), False) == A[2]


def swapped(places: tuple[Place, ...]) -> tuple[Place, ...]:
    return tuple((column, row) for row, column in places)


def test_keys_load_as_b_of_two_tiles() -> None:
    got = loaded(lambda lane: (lane % 8 + lane // 16 * 8, lane // 8 % 2 * 8), False)
    for (lane, register), places in got.items():
        tile = register // 2
        want = B[2][lane, register % 2]
        assert swapped(places) == tuple((k, column + 8 * tile) for k, column in want)


def test_values_load_transposed_as_b_of_two_tiles() -> None:
    got = loaded(lambda lane: (lane % 16, lane // 16 * 8), True)
    for (lane, register), places in got.items():
        tile = register // 2
        want = B[2][lane, register % 2]
        assert places == tuple((k, column + 8 * tile) for k, column in want)


def test_sums_of_two_tiles_pack_as_a() -> None:
    """pack(c0, c1), pack(c2, c3) of tiles 0 and 1 are a[0] to a[3]."""
    for lane in LANES:
        for register in range(4):
            tile, half = divmod(register, 2)
            pair = [C[lane, 2 * half + i] for i in (0, 1)]
            assert A[2][lane, register] == tuple((row, column + 8 * tile) for row, column in pair)
            stored = [(row + 8 * half, column) for row, column in elements_of(lane, False)]
            assert stored == pair


def test_eight_bit_values_by_ldmatrix_and_prmt() -> None:
    """Four registers of pairs of bytes become B of an even and an odd tile, with P's keys in the
    order in which the sums have them."""
    pairs = loaded(lambda lane: (lane, 0), True)  # keys 0 to 31, elements of two bytes
    for lane in LANES:
        group = lane // 4
        for half in (0, 1):  # b0 and b1, a[0] and a[2]
            low, high = pairs[lane, 2 * half], pairs[lane, 2 * half + 1]
            data = [(key, 2 * c + i) for key, c in (*low, *high) for i in (0, 1)]
            keys_of_sums = [
                C[lane, i][1] + 8 * tile for tile in (2 * half, 2 * half + 1) for i in (0, 1)
            ]
            for odd, selector in enumerate((0x6420, 0x7531)):
                taken = [data[selector >> 4 * i & 7] for i in range(4)]
                assert taken == [(key, 2 * group + odd) for key in keys_of_sums]
            # B's rows and A's columns of this half are the same for a lane's place in its group
            rows = [k for k, _ in B[1][lane, half]]
            assert rows == [k for _, k in A[1][lane, 2 * half]]
