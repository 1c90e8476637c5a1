"""Which kernel process can reach which memory: no two map the same, neither those of two kernels
nor one after another of one kernel."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from tests.harness.kernel_files import FILL, PROBLEM, REQUEST, WHERE, Writer, filled, works
from tests.harness.laid import laid
from verify.cell.arena import Arena, Holder, damage_in
from verify.cell.arenas import Arenas
from verify.cell.process import Cell
from verify.problem.inputs import tensors

LEAST = 4 << 20  # bytes of the smallest arena


@pytest.fixture
def arenas() -> Iterator[Arenas]:
    arenas = Arenas(2 * LEAST)
    yield arenas
    arenas.close()


def memory(arena: Arena) -> int:
    """A number of the memory that no other has while it is open."""
    return os.fstat(arena.fd).st_ino


def reserved(arenas: Arenas, path: str, size: int = LEAST) -> Arena:
    """The arena of that file, with so much memory, all of it touched."""
    arena = arenas.of(path)
    arena.reserve(size)
    arena.bytes[:] = 1
    return arena


# Arenas of several kernels.


def test_each_file_has_memory_of_its_own_and_keeps_it(arenas: Arenas) -> None:
    one, other = reserved(arenas, "one.py"), reserved(arenas, "other.py")
    first = memory(one), memory(other)
    assert first[0] != first[1]
    for path, number in zip(("one.py", "other.py") * 3, first * 3, strict=True):
        assert memory(reserved(arenas, path)) == number, "it was not taken again"


def test_what_is_too_much_is_freed_of_the_least_recently_asked(arenas: Arenas) -> None:
    one, two = reserved(arenas, "1"), reserved(arenas, "2")
    kept = memory(two)
    process = os.dup(one.fd)
    try:
        assert os.fstat(process).st_blocks
        reserved(arenas, "3")
        arenas.of("2")
        assert (one.capacity, memory(two)) == (0, kept)
        assert not os.fstat(process).st_blocks, "the kernel's process that maps it holds it no more"
    finally:
        os.close(process)
    large = reserved(arenas, "4", 4 * LEAST)
    assert large.capacity == 4 * LEAST
    assert large is arenas.of("4")
    assert large.capacity == 4 * LEAST, "the last one is never freed"
    arenas.of("2")
    assert large.capacity == 0
    assert reserved(arenas, "4", 10).capacity == LEAST


def test_a_dropped_arena_is_forgotten(arenas: Arenas) -> None:
    one = reserved(arenas, "1")
    arenas.drop("1")
    arenas.drop("never asked for")
    assert one.capacity == 0
    assert arenas.of("1") is not one


# Processes of one kernel.


def test_after_a_process_has_ended_there_is_fresh_memory(arena: Arena) -> None:
    arena.reserve(LEAST)
    holder = Holder()
    arena.give(holder)
    arena.give(holder)
    left = os.dup(arena.fd)  # of what may outlive it
    try:
        arena.reserve(10)
        assert memory(arena) == os.fstat(left).st_ino, "it lives"
        arena.bytes[7] = 7
        holder.ended = True
        assert arena.bytes[7] == 7, "its results can be read"
        generation = arena.generation
        arena.reserve(10)
        assert memory(arena) != os.fstat(left).st_ino
        assert arena.generation > generation
        os.pwrite(left, b"\1" * 64, 0)
        assert not arena.bytes.any()
    finally:
        os.close(left)


def test_a_process_that_follows_unforeseen_gets_a_copy(arena: Arena) -> None:
    arena.reserve(LEAST)
    gone, next_one = Holder(), Holder()
    arena.give(gone)
    arena.bytes[:] = 3
    before = memory(arena)
    with pytest.raises(ValueError, match="another kernel process maps it"):
        arena.give(next_one)
    gone.ended = True
    arena.give(next_one)
    assert memory(arena) != before
    assert (arena.bytes == 3).all()
    assert arena.capacity == LEAST


def test_no_two_arenas_have_one_generation(cell: Cell, arena: Arena, write: Writer) -> None:
    """A process would take the second for the first, and not map it."""
    good, other = write(FILL), Arena()
    try:
        assert all(works(cell, good, each) for each in (arena, other, arena))
        assert arena.generation != other.generation
    finally:
        other.close()


def test_what_a_process_mapped_is_not_what_the_next_one_maps(
    cell: Cell, arena: Arena, write: Writer
) -> None:
    good = write(FILL)
    assert works(cell, good, arena)
    first = memory(arena)
    assert works(cell, good, arena)
    assert memory(arena) == first, "the same process"
    cell.restart()
    assert works(cell, good, arena)
    assert memory(arena) != first
    second = memory(arena)
    runs = laid(arena, WHERE, tensors(PROBLEM).named)
    os.kill(cell._pid, signal.SIGKILL)
    assert select.select([cell._socket], [], [], 10)[0], "the cell has not seen it"
    assert cell.run(str(good), REQUEST, arena).ok
    assert cell.process_number == 3
    assert filled(runs)
    assert memory(arena) != second


def test_damage_that_is_restored_at_a_second_look_is_damage() -> None:
    class Restored(np.ndarray):  # type: ignore[type-arg]
        def __ne__(self, other: object) -> np.ndarray:  # type: ignore[type-arg, override]
            self[:] = other
            return super().__ne__(other)

    pristine = np.zeros(WHERE.size, np.uint8)
    now = pristine.copy()
    now[0] = 1
    damage = damage_in(WHERE, now.view(Restored), pristine)
    assert damage is not None
    assert "restored" in damage.where
