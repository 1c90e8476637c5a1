"""Launches at once, in one process: what they share shows, what each has of its own does not."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.harness.laid import contents, damage, laid
from verify.cell.arena import Arena, bits, negated, plan, side_by_side, side_name
from verify.cell.child import KernelProcess
from verify.cell.concurrent import LAUNCHES, Streams, run_concurrently
from verify.problem import Layout, Problem
from verify.problem.inputs import tensors
from verify.variant import Support, Variant

torch.set_num_threads(1)

PROBLEM = Problem(seqlen_q=4, seqlen_kv=5, head_dim=8, dtype="float32", seed=1)
WHERE = plan(PROBLEM, lse=True, workspace={})
SIDES = [side_name(launch, "out") for launch in range(LAUNCHES)]

# The launches, and what is compared.


@dataclass
class Turns:
    """Queues whose launches take turns, step by step, in an order; a launch outside of a run is
    over at once."""

    order: Sequence[int] = range(LAUNCHES)
    queued: list[list[Callable[[], None]]] = field(default_factory=list)
    seconds: float = 0.0

    def do(self, *steps: Callable[[], None]) -> None:
        """What a launch is made of."""
        if self.queued:
            self.queued[-1] += steps
        else:
            for step in steps:
                step()

    def run(self, launches: Sequence[Callable[[], None]], seconds: float) -> bool:
        self.seconds = seconds
        for launch in launches:
            self.queued.append([])
            launch()
        for steps in zip(*(self.queued[i] for i in self.order), strict=True):
            for step in steps:
                step()
        self.queued = []
        return True


def filled(problem: Problem = PROBLEM) -> Tensor:
    """The bytes of an arena with that problem's inputs, and poison."""
    arena, where = Arena(), plan(problem, lse=True, workspace={})
    laid(arena, where, tensors(problem).named)
    found = torch.from_numpy(arena.bytes[: where.size].copy())
    arena.close()
    return found


def outputs(arena: Tensor) -> list[Tensor]:
    return [bits(WHERE[name].view(arena).contiguous()) for name in ("out", "lse")]


def by_scratch(queues: Turns, shared: bool) -> Callable[[Tensor], None]:
    """A kernel that writes a sum of q into scratch, its own or everybody's, and in a second step O
    and LSE from there."""
    everybodys = torch.zeros(())

    def launch(arena: Tensor) -> None:
        q, out, lse = (WHERE[name].view(arena) for name in ("q", "out", "lse"))
        scratch = everybodys if shared else torch.zeros(())
        queues.do(
            lambda: scratch.copy_(q.sum()),
            lambda: (out.copy_(scratch.expand(out.shape)), lse.fill_(float(scratch)))[0],
        )

    return launch


def others(arena: Tensor) -> list[Tensor]:
    """The arenas of all launches, as the judge lays them: every other one with negated Q."""
    made = [arena.clone() for _ in range(LAUNCHES)]
    for each in made[1::2]:
        view = WHERE["q"].view(each)
        view.copy_(-view)
    return made


def strays(order: Sequence[int], shared: bool) -> list[bool]:
    """Of which launches the outputs differ from what a lone launch of the same inputs gives."""
    queues = Turns(order)
    launch = by_scratch(queues, shared)
    arenas, alone = others(filled()), others(filled())
    for each in alone:
        launch(each)
    assert run_concurrently(arenas, launch, queues) is True
    pairs = zip(arenas, alone, strict=True)
    return [
        any(not a.equal(b) for a, b in zip(outputs(x), outputs(y), strict=True)) for x, y in pairs
    ]


# who writes last: one with negated inputs, one with the case's own
ORDERS = ((0, 1, 2, 3), (1, 3, 0, 2))


@pytest.mark.parametrize("order", ORDERS)
def test_launches_that_share_nothing_are_the_same_alone(order: Sequence[int]) -> None:
    assert strays(order, shared=False) == [False] * LAUNCHES


def test_a_shared_scratch_shows_whoever_writes_it_last() -> None:
    assert strays(ORDERS[0], shared=True) == [True, False, True, False], (
        "all read what one with negated inputs wrote"
    )
    assert strays(ORDERS[1], shared=True) == [False, True, False, True]


def test_launches_are_held_back_for_as_long_as_queueing_them_takes_but_not_for_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for took, held in ((1e-6, 5e-4), (2e-4, 1.6e-3), (3.0, 1e-2)):
        clock = iter((5.0, 5.0 + took))
        monkeypatch.setattr(
            "verify.cell.concurrent.time.perf_counter", lambda clock=clock: next(clock)
        )
        queues = Turns()
        run_concurrently(others(filled()), by_scratch(queues, False), queues)
        assert queues.seconds == pytest.approx(held)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16", "bfloat16", "float32"])
def test_negated_inputs_differ_in_their_signs_alone(dtype: str) -> None:
    problem = Problem(
        batch=2, seqlen_q=4, seqlen_kv=5, head_dim=8, dtype=dtype, layout_q=Layout(expand="b")
    )
    q = tensors(problem).q
    assert negated(q).double().equal(-q.double())
    assert (bits(negated(q)) != bits(q)).all(), "zeros too"
    assert negated(torch.tensor([math.nan])).isnan().all()


@pytest.mark.parametrize("entry", ["forward", "backward"])
def test_launches_lie_side_by_side_and_damage_in_any_of_them_is_seen(entry: str) -> None:
    where = plan(PROBLEM, lse=True, workspace={}, entry=entry)
    given = {
        name: torch.full(slot.shape, 0.5, dtype=torch.float32)
        for slot in where.of("input")
        for name in [slot.name]
    }
    other = given | {"q": torch.full(where["q"].shape, -0.5)}
    whole, inputs = side_by_side(where, [given, other])
    assert whole.size == 2 * where.size
    arena = Arena()
    try:
        runs = laid(arena, whole, inputs)
        halves = torch.from_numpy(arena.bytes[: whole.size]).view(2, -1).unbind()
        assert [float(where["q"].view(half).mean()) for half in halves] == [0.5, -0.5]
        for half in halves:
            for slot in where.of("output"):
                slot.view(half).fill_(1.0)
        assert damage(runs) is None
        halves[1][where["k"].start] ^= 1
        found = damage(runs)
        assert found is not None
        assert found.slot == side_name(1, "k")
    finally:
        arena.close()


# Streams, with a CUDA that only takes notes.


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of CUDA, in order."""
    found: list[str] = []

    class Stream:
        def __init__(self, name: str = "") -> None:
            self.name = name or f"s{sum(note.startswith('new') for note in found)}"
            found.append(f"new {self.name}")

        def record_event(self) -> SimpleNamespace:
            found.append(f"{self.name} records")
            return SimpleNamespace(query=lambda: "late" in found)

        def wait_event(self, event: object) -> None:
            found.append(f"{self.name} waits")

        def wait_stream(self, other: Stream) -> None:
            found.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        found.append(f"on {stream.name}")
        yield
        found.append("off")

    main = Stream("main")
    found.clear()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(
        torch.cuda, "_sleep", lambda cycles: found.append(f"sleeps {cycles}"), raising=False
    )
    return found


def test_streams_wait_for_the_inputs_and_are_waited_for(notes: list[str]) -> None:
    streams = Streams()
    assert streams.run([lambda i=i: notes.append(f"launch {i}") for i in range(LAUNCHES)], 1e-3)
    assert notes[:LAUNCHES] == [f"new s{i}" for i in range(LAUNCHES)]
    each = [[f"s{i} waits", f"on s{i}", f"launch {i}", "off"] for i in range(LAUNCHES)]
    ends = [f"main waits for s{i}" for i in range(LAUNCHES)]
    assert notes[LAUNCHES:] == [
        "sleeps 2000000",
        "main records",
        *(note for notes_of in each for note in notes_of),
        *ends,
    ]
    notes.clear()
    assert not streams.run([lambda: notes.append("late")] * LAUNCHES, 1e-3), (
        "the device was not held for so long"
    )
    assert not any(note.startswith("new") for note in notes), "torch keeps memory for each stream"


def test_a_launch_that_raises_is_waited_for_too(notes: list[str]) -> None:
    def raises() -> None:
        raise ValueError("no such tile")

    with pytest.raises(ValueError, match="no such tile"):
        Streams().run([lambda: None, raises, lambda: None, lambda: None], 1e-3)
    assert notes[-LAUNCHES:] == [f"main waits for s{i}" for i in range(LAUNCHES)]


# In a process.


@pytest.mark.parametrize("steady", [True, False])
def test_a_process_runs_every_launch_in_its_own_buffers_and_judges_nothing(steady: bool) -> None:
    calls: list[int] = []

    def forward(args: Any, out: Tensor, lse: Tensor, workspace: Any) -> None:
        calls.append(1)
        out.copy_(args.q)
        lse.fill_(1.0 if steady else len(calls))

    process = KernelProcess(cast(Any, None))
    support = Support(dtypes=("float32",), head_dims=(8,))
    process.variants = {
        "kernel": Variant(name="kernel", family="torch", forward=forward, support=support)
    }
    process.streams = cast(Streams, Turns())
    given = tensors(PROBLEM).named
    both = (given, given | {"q": negated(given["q"])})
    whole, inputs = side_by_side(WHERE, [both[i % 2] for i in range(LAUNCHES)])
    arena = Arena()
    runs = laid(arena, whole, inputs)
    process.host = torch.from_numpy(arena.bytes[: whole.size])
    request = {
        "op": "run",
        "variant": "kernel",
        "entry": "forward",
        "config": "default",
        "slots": WHERE.as_data(),
        "device": "cpu",
    }
    request |= {
        "size": WHERE.size,
        "mask": "full",
        "softmax_scale": 1.0,
        "score_mod": "",
        "concurrent": LAUNCHES,
    }
    assert process._answer(request, []) == {"status": "ok", "held": True}
    assert len(calls) == 1 + LAUNCHES
    for launch, name in enumerate(SIDES):
        assert contents(runs, name).equal(both[launch % 2]["q"]), "each of its own inputs"
    assert damage(runs) is None
    process.host = torch.empty(0, dtype=torch.uint8)
    arena.close()
