"""Guarded memory: the arena finds each planted fault and describes its place; a clean run has
none."""

from __future__ import annotations

import json
import math
import os
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.harness.laid import contents, damage
from tests.harness.laid import laid as lay_alone
from verify.cell.arena import (
    ALIGNMENT,
    CANARY,
    POISONS,
    REDZONE,
    Arena,
    Damage,
    bits,
    pattern,
    plan,
    slots_from,
    unwritten,
)
from verify.cell.arena_runs import Runs
from verify.problem import Layout, Problem
from verify.problem.inputs import tensors

torch.set_num_threads(1)

PROBLEM = Problem(
    batch=2,
    heads_q=2,
    heads_kv=1,
    seqlen_q=5,
    seqlen_kv=7,
    head_dim=8,
    dtype="float16",
    layout_k=Layout("bshd", pitch=8),
    layout_v=Layout(offset=1),
    layout_out=Layout(pitch=3, offset=2),
)
WORKSPACE = {"acc": ((3, 5), "float32"), "partial": ((2, 2), "float16")}
BUFFERS = ("q", "k", "v", "out", "lse", "workspace.acc", "workspace.partial")
OURS = ("q", "k", "v")
by_buffer = pytest.mark.parametrize("name", BUFFERS)
by_poison = pytest.mark.parametrize("poison", POISONS)


def laid(arena: Arena, problem: Problem = PROBLEM, poison: str = "nan") -> Runs:
    where = plan(problem, lse=True, workspace=WORKSPACE)
    return lay_alone(arena, where, tensors(problem).named, poison)


def tensor(runs: Runs, name: str) -> Tensor:
    return runs.where[name].view(torch.from_numpy(runs.arena.bytes))


def struck(runs: Runs, byte: int) -> Damage:
    """The damage that is found after one byte was flipped."""
    runs.arena.bytes[byte] ^= 0xFF
    found = damage(runs)
    assert found is not None, f"byte {byte} ({runs.where.owner(byte)}) changed unseen"
    return found


# The plan.


def test_slots_keep_their_distance() -> None:
    for problem in (
        PROBLEM,
        PROBLEM.but(seqlen_q=0),
        PROBLEM.but(seqlen_kv=0),
        PROBLEM.but(dtype="float64", batch=1),
    ):
        where = plan(problem, lse=True, workspace=WORKSPACE)
        slots = where.slots
        assert {slot.name for slot in slots} == set(BUFFERS)
        assert slots[0].begin >= REDZONE
        assert where.size - slots[-1].end >= REDZONE
        for one, other in pairwise(slots):
            assert other.begin - one.end >= REDZONE
        for slot in slots:
            assert slot.begin % ALIGNMENT == 0
            arena = torch.arange(where.size // 4, dtype=torch.int32).view(torch.uint8)
            view = slot.view(arena)
            if view.numel():
                assert slot.begin <= slot.start
                last = sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True)) + 1
                assert slot.start + last * view.itemsize <= slot.end


def test_without_an_lse_there_is_no_buffer_for_one() -> None:
    where = plan(PROBLEM, lse=False, workspace={})
    assert "lse" not in where
    assert [slot.name for slot in where.slots] == ["q", "k", "v", "out"]


def test_slots_survive_json() -> None:
    where = plan(PROBLEM, lse=True, workspace=WORKSPACE)
    assert slots_from(json.loads(json.dumps(where.as_data()))) == where.slots


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_an_offset_misaligns_the_pointer(arena: Arena, offset: int, dtype: str) -> None:
    problem = PROBLEM.but(layout_q=Layout(offset=offset), dtype=dtype)
    runs = laid(arena, problem)
    q = tensor(runs, "q")
    assert q.data_ptr() % ALIGNMENT == offset * q.itemsize
    assert tensor(runs, "lse").data_ptr() % ALIGNMENT == 0


def test_an_expanded_tensor_is_stored_once(arena: Arena) -> None:
    problem = PROBLEM.but(
        batch=3,
        heads_q=2,
        heads_kv=2,
        layout_k=Layout(expand="bh"),
        layout_v=Layout("bshd", expand="h"),
    )
    runs = laid(arena, problem)
    inputs = tensors(problem)
    k, v = tensor(runs, "k"), tensor(runs, "v")
    assert k.stride()[:2] == (0, 0)
    assert v.stride()[1] == 0
    slot = runs.where["k"]
    assert slot.end - slot.begin == 7 * 8 * 2  # seqlen_kv rows of head_dim halves
    assert torch.equal(bits(k.contiguous()), bits(inputs.k.expand(problem.shape_k).contiguous()))
    assert torch.equal(bits(v.contiguous()), bits(inputs.v.expand(problem.shape_v).contiguous()))
    assert damage(runs) is None


# What is laid.


@by_poison
def test_inputs_are_as_generated_and_outputs_poisoned(arena: Arena, poison: str) -> None:
    runs = laid(arena, poison=poison)
    inputs = tensors(PROBLEM)
    for name in OURS:
        assert torch.equal(bits(contents(runs, name)), bits(getattr(inputs, name)))
    for name in set(BUFFERS) - set(OURS):
        assert bool(unwritten(contents(runs, name), poison).all())


# the fraction's first bit
QUIET = {torch.float16: 9, torch.bfloat16: 6, torch.float32: 22, torch.float64: 51}
by_format = pytest.mark.parametrize("dtype", QUIET, ids=str)


@by_format
def test_a_canary_is_a_quiet_nan_in_every_format(dtype: torch.dtype) -> None:
    word = torch.tensor([CANARY] * 4, dtype=torch.int32).to(torch.int16).view(dtype)[:1]
    assert bool(word.isnan())
    assert int(bits(word)) >> QUIET[dtype] & 1


@by_format
def test_poisons(dtype: torch.dtype) -> None:
    nan, huge = pattern(dtype, "nan"), pattern(dtype, "huge")
    assert bool(nan.isnan())
    assert int(bits(nan)) >> QUIET[dtype] & 1
    assert bool(huge.isfinite())
    assert float(huge.double()) >= 65504
    canary = torch.tensor([CANARY] * 4, dtype=torch.int32).to(torch.int16).view(dtype)[:1]
    ordinary = torch.full((1,), float("nan"), dtype=dtype)
    # what CUDA makes of 0 / 0
    quiet_all_ones = torch.full((dtype.itemsize // 2,), 0x7FFF, dtype=torch.int16).view(dtype)
    for other in (canary, ordinary, quiet_all_ones, huge):
        assert not torch.equal(bits(nan), bits(other))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_poisons_of_8_bits(dtype: torch.dtype) -> None:
    """The NaN poison is neither a finite number nor the NaN that conversions give: these can be
    right outputs."""
    nan, huge = pattern(dtype, "nan"), pattern(dtype, "huge")
    ordinary = torch.full((1,), float("nan")).to(dtype)
    assert bool(nan.float().isnan())
    assert not torch.equal(bits(nan), bits(ordinary))
    assert 256 < float(huge.float()) < math.inf


@by_poison
def test_the_poison_of_a_strided_output_leaves_its_gaps(arena: Arena, poison: str) -> None:
    runs = laid(arena, poison=poison)
    slot = runs.where["out"]
    held = torch.from_numpy(arena.bytes[slot.begin : slot.end]).view(torch.float16)
    elements = math.prod(PROBLEM.shape_out)
    assert int(unwritten(held, poison).sum()) == elements
    assert int((bits(held) == CANARY).sum()) == held.numel() - elements > 0


# Faults.


@by_poison
def test_a_clean_run_finds_nothing(arena: Arena, poison: str) -> None:
    runs = laid(arena, poison=poison)
    assert damage(runs) is None
    for name in ("out", "lse", "workspace.acc", "workspace.partial"):
        tensor(runs, name).fill_(1.25)
    out = contents(runs, "out")
    assert bool((out == 1.25).all())
    assert damage(runs) is None


@by_buffer
@pytest.mark.parametrize("distance", [1, 2, 16, REDZONE])
def test_a_byte_before_or_after_a_buffer_is_found(arena: Arena, name: str, distance: int) -> None:
    runs = laid(arena)
    slot = runs.where[name]
    found = struck(runs, slot.end + distance - 1)
    assert (found.slot, found.count) == ("redzone", 1)
    assert found.where == f"{distance - 1} bytes past the end of {name}"

    runs = laid(arena)
    found = struck(runs, slot.begin - distance)
    assert (found.slot, found.count) == ("redzone", 1)
    order = [s.name for s in runs.where.slots]
    neighbour = order[order.index(name) - 1] if order.index(name) else None
    words = f"past the end of {neighbour}" if neighbour else f"{distance} bytes before {name}"
    assert words in found.where


def test_every_byte_that_is_no_output_is_guarded(arena: Arena) -> None:
    """A change of any byte outside the outputs is found (sampled)."""
    runs = laid(arena)
    free = torch.zeros(runs.where.size, dtype=torch.uint8)
    for name in set(BUFFERS) - set(OURS):
        view = runs.where[name].view(free)
        view.view(torch.uint8).fill_(1) if view.is_contiguous() else bits(view).fill_(-1)
    guarded = (free == 0).nonzero().flatten()
    # out, lse, acc, partial
    assert runs.where.size - len(guarded) == 2 * 2 * 5 * 8 * 2 + 2 * 2 * 5 * 4 + 15 * 4 + 4 * 2
    for byte in guarded[
        torch.randperm(len(guarded), generator=torch.Generator().manual_seed(0))[:200]
    ].tolist():
        runs = laid(arena)
        assert struck(runs, byte).count == 1


def test_a_write_into_the_gap_of_a_pitched_tensor_is_found(arena: Arena) -> None:
    runs = laid(arena)
    gap = runs.where["out"].start + PROBLEM.head_dim * 2  # just behind the first row
    found = struck(runs, gap)
    assert (found.slot, found.count) == ("redzone", 1)
    assert found.where == "+16 bytes from the start of out, inside its allocation"
    runs = laid(arena)
    found = struck(runs, runs.where["out"].start - 1)
    assert found.where == "-1 bytes from the start of out, inside its allocation"


@pytest.mark.parametrize("name", OURS)
def test_a_changed_input_is_found(arena: Arena, name: str) -> None:
    runs = laid(arena)
    tensor(runs, name)[1, 0, 2, 3] += 1
    found = damage(runs)
    assert found is not None
    assert found.slot == name
    assert f"from the start of {name}, inside its allocation" in found.where


def test_the_sign_of_a_zero_in_an_input_is_a_change(arena: Arena) -> None:
    problem = PROBLEM.but(distribution="counting")
    runs = laid(arena, problem)
    tensor(runs, "q")[0, 0, 0, 0] = -0.0
    found = damage(runs)
    assert found is not None
    assert (found.slot, found.count) == ("q", 1)


def test_all_damaged_bytes_are_counted_and_the_first_is_named(arena: Arena) -> None:
    runs = laid(arena)
    end = runs.where["lse"].end
    arena.bytes[end + 4 : end + 10] ^= 0xFF
    arena.bytes[runs.where.size - 1] ^= 0xFF
    found = damage(runs)
    assert found is not None
    assert (found.count, found.where) == (7, "4 bytes past the end of lse")


@by_poison
def test_an_element_left_unwritten_is_found(arena: Arena, poison: str) -> None:
    runs = laid(arena, poison=poison)
    out = tensor(runs, "out")
    kept = out[1, 0, 3, 5].clone()
    out.fill_(0.5)
    assert not bool(unwritten(contents(runs, "out"), poison).any())
    out[1, 0, 3, 5] = kept
    left = unwritten(contents(runs, "out"), poison)
    assert left.nonzero().tolist() == [[1, 0, 3, 5]]


def test_an_honest_nan_is_not_taken_for_unwritten(arena: Arena) -> None:
    runs = laid(arena)
    tensor(runs, "out").fill_(float("nan"))
    assert not bool(unwritten(contents(runs, "out"), "nan").any())


def test_damage_is_found_again_after_the_arena_was_laid_anew(arena: Arena) -> None:
    runs = laid(arena)
    struck(runs, 0)
    runs = laid(arena, PROBLEM.but(seqlen_kv=33))
    assert damage(runs) is None
    assert struck(runs, runs.where.size - 1).count == 1


def test_an_empty_problem_is_guarded_too(arena: Arena) -> None:
    problem = PROBLEM.but(seqlen_q=0, seqlen_kv=0)
    runs = laid(arena, problem)
    assert contents(runs, "out").shape == (2, 2, 0, 8)
    assert damage(runs) is None
    assert struck(runs, runs.where["q"].begin).slot in ("redzone", "q")


# The arena itself.


def test_reserve_grows_and_says_so() -> None:
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena()
    arena.reserve(10)
    first, generation = arena.capacity, arena.generation
    assert first >= 10
    arena.reserve(first)
    assert (arena.capacity, arena.generation) == (first, generation), "there was room"
    arena.reserve(first + 1)
    assert arena.capacity >= first + 1
    assert arena.generation == generation + 1
    assert len(arena.bytes) == arena.capacity
    assert os.fstat(arena.fd).st_size == arena.capacity
    arena.close()
    arena.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_tensor_that_outlives_the_arena_does_no_harm() -> None:
    arena = Arena()
    runs = laid(arena)
    q = tensor(runs, "q")
    wanted = q.clone()
    arena.reserve(arena.capacity + 1)
    assert torch.equal(q, wanted)
    runs = laid(arena)
    assert damage(runs) is None
    arena.close()
    assert torch.equal(q, wanted)


def test_another_process_sees_the_same_bytes(arena: Arena) -> None:
    runs = laid(arena)
    size = os.fstat(arena.fd).st_size
    data = os.pread(arena.fd, size, 0)
    assert data == arena.bytes.tobytes()
    os.pwrite(arena.fd, b"\0", runs.where["q"].begin - 1)
    found = damage(runs)
    assert found is not None
    assert found.where == "1 bytes before q"


def test_nobody_can_change_the_size_of_the_arena(arena: Arena) -> None:
    """Reading a mapped file past its end raises SIGBUS: a kernel that shrank the file would crash
    the judge."""
    arena.reserve(10)
    for size in (0, 4096, arena.capacity * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
