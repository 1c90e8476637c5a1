"""Isolated buffers: each ends at its last element, and what a run writes comes back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from verify.cell.arena import Arena, plan
from verify.cell.isolated_buffers import IsolatedBuffers
from verify.problem import Layout, Problem

torch.set_num_threads(1)

STRIDED = Problem(
    batch=2,
    heads_q=4,
    heads_kv=2,
    seqlen_q=5,
    seqlen_kv=7,
    head_dim=8,
    dtype="float16",
    layout_q=Layout("bshd", 3, 1),
    layout_k=Layout("sbhd", 0, 0, "h"),
    layout_out=Layout("bhsd", 8, 8),
)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena()
    yield arena
    arena.close()


def isolated(arena: Arena, problem: Problem) -> tuple[IsolatedBuffers, torch.Tensor]:
    where = plan(
        problem, lse=True, workspace={"scratch": ((3,), "float32"), "none": ((0, 4), "float32")}
    )
    arena.reserve(where.size)
    arena.bytes[:] = torch.arange(arena.capacity, dtype=torch.int64).to(torch.uint8).numpy()
    host = torch.from_numpy(arena.bytes)
    return IsolatedBuffers(where.slots, host, "cpu"), host


@pytest.mark.parametrize("problem", [STRIDED, STRIDED.but(seqlen_kv=0), STRIDED.but(seqlen_q=0)])
def test_every_tensor_holds_what_the_arena_holds_and_every_buffer_ends_at_its_last_element(
    arena: Arena, problem: Problem
) -> None:
    separate, host = isolated(arena, problem)
    for slot in plan(
        problem, lse=True, workspace={"scratch": ((3,), "float32"), "none": ((0, 4), "float32")}
    ).slots:
        theirs, ours = slot.view(host), slot.view(separate)  # type: ignore[arg-type]
        assert (ours.shape, ours.stride(), ours.dtype) == (
            theirs.shape,
            theirs.stride(),
            theirs.dtype,
        )
        held = torch.equal(
            ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)
        )
        assert held or slot.role == "workspace"  # nothing has written one
        last = (
            1 + sum((n - 1) * s for n, s in zip(ours.shape, ours.stride(), strict=True))
            if ours.numel()
            else 0
        )
        assert (
            ours.untyped_storage().nbytes() == (ours.storage_offset() + last) * ours.element_size()
        )


def test_what_a_run_writes_comes_back_and_what_it_writes_past_the_end_cannot(arena: Arena) -> None:
    separate, host = isolated(arena, STRIDED)
    where, before = (
        plan(
            STRIDED, lse=True, workspace={"scratch": ((3,), "float32"), "none": ((0, 4), "float32")}
        ),
        host.clone(),
    )
    for name in ("out", "workspace.scratch"):  # a workspace stays where it is
        where[name].view(separate).fill_(3.0)  # type: ignore[arg-type]
    assert torch.equal(host, before)
    separate.restore()
    assert bool((where["out"].view(host) == 3.0).all())
    outside = torch.ones_like(host, dtype=torch.bool)
    outside[where["out"].begin : where["out"].end] = False
    assert torch.equal(host[outside], before[outside])


def test_bytes_of_no_buffer_cannot_be_had(arena: Arena) -> None:
    separate, _ = isolated(arena, STRIDED)
    where = plan(STRIDED, lse=True, workspace={})
    for start, stop in (
        (0, 8),
        (where["lse"].start, where["lse"].end + 4),
        (where["lse"].start - 4, where["lse"].end),
    ):
        with pytest.raises(IndexError):
            separate[start:stop]
