"""Kernels run another way: with read-only or shared inputs, from a CUDA graph, and while another
device is current; each oracle convicts its planted fault and passes a right kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.harness.fake_trials import OK, PLAIN, convicted, right_run, trial_of
from tests.harness.laid import laid
from tests.harness.property_cases import Bench, bench
from verify.cell import ways
from verify.cell.arena import Arena, bits, plan, side_name
from verify.cell.child import KernelProcess
from verify.cell.concurrent import LAUNCHES, Streams
from verify.cell.process import PLAIN_CPU, PLAIN_CUDA, Cell, Reply
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.oracles import graph, of_group, other_device, read_only, shared_inputs
from verify.problem import Layout, Problem
from verify.problem.inputs import tensors
from verify.variant import Contract, Support, Variant

torch.set_num_threads(1)

PROBLEM = Problem(seqlen_q=4, seqlen_kv=5, head_dim=8, dtype="float32", seed=8)
WHERE = plan(PROBLEM, lse=True, workspace={})


# Read-only inputs, in a process of its own.


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench("restores.py", tmp_path_factory.mktemp("restores")) as opened:
        yield opened


@pytest.mark.parametrize(("entry", "group"), [("forward", "accuracy"), ("backward", "gradients")])
def test_an_input_that_is_changed_and_put_back_shows_in_read_only_memory_alone(
    entry: str, group: str, kernels: Bench
) -> None:
    problem = PLAIN.but(heads_q=2, seed=8)
    for oracle in ("repeat", "read_only"):
        verdict = kernels.verdict(f"right-{entry}", group, oracle, problem)
        assert verdict.outcome == "pass", verdict.finding
    assert kernels.verdict(f"restores-{entry}", group, "repeat", problem).outcome == "pass"
    verdict = kernels.verdict(f"restores-{entry}", group, "read_only", problem)
    assert verdict.finding is not None
    assert "inputs that cannot be written it is killed by SIGSEGV" in verdict.finding.message


def test_the_pages_of_every_input_and_of_no_output_are_read_only() -> None:
    problem = PROBLEM.but(layout_k=Layout("bshd", 3, 1), seqlen_kv=3000)
    where = plan(problem, lse=True, workspace={"scratch": ((5,), "float32")})
    spans = [ways._pages(slot) for slot in where.of("input")]
    for begin, end in spans:
        assert begin % 4096 == end % 4096 == 0
        for slot in (*where.of("output"), *where.of("workspace")):
            assert end <= slot.begin or slot.end <= begin
    arena = Arena()
    try:
        laid(arena, where, tensors(problem).named)
        host = torch.from_numpy(arena.bytes)
        with ways.read_only(where.slots, host):
            where["out"].view(host).fill_(1.0)
            assert float(where["k"].view(host).sum()) != 0
        where["k"].view(host).fill_(1.0)  # afterwards it can be written
    finally:
        arena.close()


# Shared inputs, a graph, another device: what a process does.


class Steps:
    """Queues whose launches are made of steps, and take turns."""

    def __init__(self) -> None:
        self.queued: list[list[Callable[[], object]]] = []

    def do(self, *steps: Callable[[], object]) -> None:
        if self.queued:
            self.queued[-1] += steps
        else:
            for step in steps:
                step()

    def run(self, launches: Sequence[Callable[[], None]], seconds: float) -> bool:
        for launch in launches:
            self.queued.append([])
            launch()
        turns, self.queued = self.queued, []
        for steps in zip(*turns, strict=True):
            for step in steps:
                step()
        return True


def process_of(forward: Callable[..., None], host: Tensor) -> KernelProcess:
    process = KernelProcess(cast(Any, None))
    support = Support(dtypes=("float32",), head_dims=(8,))
    process.variants = {
        "kernel": Variant(name="kernel", family="torch", forward=forward, support=support)
    }
    process.host = host
    return process


def request(**more: object) -> dict[str, Any]:
    return {
        "op": "run",
        "variant": "kernel",
        "entry": "forward",
        "config": "default",
        "slots": WHERE.as_data(),
        "device": "cpu",
        "size": WHERE.size,
        "mask": "full",
        "softmax_scale": 1.0,
        "score_mod": "",
        **more,
    }


def filled() -> Tensor:
    """The bytes of an arena with the problem's inputs, and poison."""
    arena = Arena()
    laid(arena, WHERE, tensors(PROBLEM).named)
    host = torch.from_numpy(arena.bytes[: WHERE.size].copy())
    arena.close()
    return host


@pytest.mark.parametrize("restores", [False, True])
def test_a_change_of_a_shared_input_is_seen_by_another_launch(restores: bool) -> None:
    queues = Steps()

    def forward(args: Any, out: Tensor, lse: Tensor, workspace: Any) -> None:
        change = 1.0 if restores else 0.0
        queues.do(
            lambda: args.q.add_(change),
            lambda: (out.copy_(args.q - change), lse.fill_(1.0)),
            lambda: args.q.sub_(change),
        )

    host = torch.cat([filled() for _ in range(LAUNCHES)])
    process = process_of(forward, host)
    process.streams = cast(Streams, queues)
    reply = process._answer(request(concurrent=LAUNCHES, way=ways.SHARED), [])
    assert reply == {"status": "ok", "held": True}
    want = tensors(PROBLEM).q
    parts = host.view(LAUNCHES, -1).unbind()
    same = [torch.allclose(WHERE["out"].view(part), want, atol=1e-3) for part in parts]
    assert same == [not restores] * LAUNCHES
    for part in parts[1:]:  # no launch touches the other copies
        assert WHERE["q"].view(part).equal(want)


class Graph:
    """Stands in for torch.cuda.CUDAGraph: the steps of the launch that was captured."""

    steps: tuple[Callable[[], object], ...] = ()

    def replay(self) -> None:
        for step in self.steps:
            step()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A CUDA that only takes notes.  capturing: the graph that is captured, or None."""
    state = SimpleNamespace(capturing=None, current=0, devices=2)

    class Capture:
        def __init__(self, graph: Graph) -> None:
            self.graph = graph

        def __enter__(self) -> None:
            state.capturing = self.graph

        def __exit__(self, *error: object) -> None:
            state.capturing = None

    class Device:
        def __init__(self, number: int) -> None:
            self.number = number

        def __enter__(self) -> None:
            self.before, state.current = state.current, self.number

        def __exit__(self, *error: object) -> None:
            state.current = self.before

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: state.devices)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.current)
    return state


@pytest.mark.parametrize("fault", ["", "keeps", "cannot"])
def test_a_replay_has_the_inputs_that_are_there(fault: str, cuda: SimpleNamespace) -> None:
    kept: list[Tensor] = []

    def forward(args: Any, out: Tensor, lse: Tensor, workspace: Any) -> None:
        if fault == "cannot" and cuda.capturing:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        kept.append(args.q.clone())
        source = kept[0] if fault == "keeps" else args.q
        steps = (lambda: out.copy_(source), lambda: lse.fill_(1.0))
        if cuda.capturing:
            cuda.capturing.steps = steps
        else:
            for step in steps:
                step()

    host = filled()
    process = process_of(forward, host)
    reply = process._answer(request(way=ways.GRAPH), [])
    if fault == "cannot":
        assert reply["gone"] is False
        assert reply["why"] == "operation not permitted when stream is capturing"
        assert process.poisoned  # a fresh process follows
        return
    assert reply == {"status": "ok", "gone": True}
    assert not process.poisoned
    want = tensors(PROBLEM).q
    assert WHERE["q"].view(host).equal(want)
    assert WHERE["out"].view(host).equal(-want if fault else want)


@pytest.mark.parametrize("devices", [1, 2])
def test_another_device_is_current_if_there_is_one(devices: int, cuda: SimpleNamespace) -> None:
    current: list[int] = []
    cuda.devices = devices

    def forward(args: Any, out: Tensor, lse: Tensor, workspace: Any) -> None:
        current.append(torch.cuda.current_device())

    process = process_of(forward, filled())
    reply = process._answer(request(way=ways.OTHER_DEVICE), [])
    assert reply == {"status": "ok", "gone": devices > 1}
    assert (current, cuda.current) == ([devices - 1], 0)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16", "float32"])
def test_a_q_with_expanded_heads_is_negated_once(dtype: str) -> None:
    problem = PROBLEM.but(heads_q=2, heads_kv=2, dtype=dtype, layout_q=Layout(expand="h"))
    where, given = plan(problem, lse=True, workspace={}), tensors(problem)
    arena = Arena()
    try:
        laid(arena, where, given.named)
        host = torch.from_numpy(arena.bytes)
        ways._negate(where.slots, host)
        view = where["q"].view(host)
        assert view.double().equal(-given.q.double().expand(view.shape))
        assert where["k"].view(host).double().equal(given.k.double())
    finally:
        arena.close()


# The oracles.

GONE = Reply("ok", data={ways.GONE: True})
WAYS = [(graph, ways.GRAPH), (other_device, ways.OTHER_DEVICE)]


def judged(way: str, change: Callable[[Launch], Launch] = lambda run: run) -> Trial:
    """A trial whose run came back so, another way."""
    trial = trial_of(PLAIN)
    trial.launches["first"] = right_run(trial)
    trial.launches[way] = change(replace(right_run(trial), reply=GONE))
    return trial


def flipped(run: Launch, name: str = "out") -> Launch:
    """One bit of an output is another."""
    tensor = run.outputs[name].clone()
    bits(tensor).view(-1)[100] ^= 1
    return replace(run, outputs={**run.outputs, name: tensor})


@pytest.mark.parametrize(("oracle", "way"), WAYS)
def test_the_same_bits_are_right_and_one_bit_is_convicted(oracle: ModuleType, way: str) -> None:
    ruling = oracle.judge(judged(way))
    assert (ruling.finding, list(ruling.measures.values())) == (None, [1.0])
    convicted(oracle.judge(judged(way, flipped)), "should keep its bits", "1 of 768 elements")
    broken = replace(right_run(trial_of(PLAIN)), reply=Reply("raised", "illegal address"))
    assert "illegal address" in convicted(oracle.judge(judged(way, lambda run: broken))).message


@pytest.mark.parametrize(("oracle", "way"), WAYS)
def test_what_cannot_be_tried_convicts_nobody(oracle: ModuleType, way: str) -> None:
    ruling = oracle.judge(judged(way, lambda run: replace(run, reply=OK)))
    assert (ruling.finding, list(ruling.measures.values())) == (None, [0.0])


def test_every_launch_that_shares_inputs_is_compared() -> None:
    def sides(run: Launch) -> Launch:
        outputs = {
            side_name(i, name): tensor
            for i in range(LAUNCHES)
            for name, tensor in run.outputs.items()
        }
        return replace(run, outputs=outputs)

    assert shared_inputs.judge(judged(ways.SHARED, sides)).finding is None
    for launch in range(LAUNCHES):
        name = side_name(launch, "out")
        trial = judged(ways.SHARED, lambda run, name=name: flipped(sides(run), name))  # type: ignore[misc]
        convicted(shared_inputs.judge(trial), "launches at once that share inputs: out should")
    gone = replace(right_run(trial_of(PLAIN)), reply=Reply("out of memory"))
    assert shared_inputs.judge(judged(ways.SHARED, lambda run: gone)).finding is None


ALL = (read_only, shared_inputs, graph, other_device)


@pytest.mark.parametrize("oracle", ALL)
def test_an_eighth_of_the_cases_of_its_device_is_judged(oracle: ModuleType) -> None:
    name = oracle.__name__.rpartition(".")[2]
    for group in ("accuracy", "gradients"):
        (found,) = (each for each in of_group(group) if each.name == name)
        for environment in (PLAIN_CPU, PLAIN_CUDA):
            asked = []
            for seed in range(16):
                trial = trial_of(PLAIN.but(seed=seed))
                trial.cell = cast(Cell, SimpleNamespace(environment=environment))
                asked.append(found.concerns(trial))
            here = (environment.device == "cpu") == (oracle is read_only)
            assert sum(asked) == 2 * here
            # Cases that are judged together are in one eighth.
            trial = trial_of(PLAIN.but(seed=asked.index(True) if here else 0))
            trial.cell = cast(Cell, SimpleNamespace(environment=environment))
            beside = []
            for number in range(64):
                trial.number = number
                beside.append(found.concerns(trial))
            assert sum(beside) == (64 if oracle is read_only else 2) * here


def test_who_is_excused() -> None:
    free = replace(
        trial_of(PLAIN).declaration,
        contract=Contract(deterministic=False, deterministic_backward=False),
    )
    for group in ("accuracy", "gradients"):
        oracles = {each.name: each for each in of_group(group)}
        for name in ("shared_inputs", "graph", "other_device"):
            assert oracles[name].excludes(free) == "declared not deterministic"
        assert oracles["read_only"].excludes(free) is None
        trial = trial_of(PLAIN.but(seed=8), interpreted=True)  # which writes every tensor back
        trial.cell = cast(Cell, SimpleNamespace(environment=PLAIN_CPU))
        assert not oracles["read_only"].concerns(trial)
