"""Where the time of a campaign's workers goes: a plugin of pytest.  `tests.harness.command_times`
gives it to all processes of a command (PYTEST_PLUGINS).

Each worker keeps a stack of spans.  A second counts for the innermost span alone, so the spans of a
worker add up to its life.  The functions that are spans are replaced when pytest begins; the
product knows nothing of them.  `kernel process` and `waits for the device` are what a kernel
process says of its own time (`verify.cell.child`).  What a message takes beyond that is its way
there and back, and the time until a process that is ready has a core.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

FOLDER = "WORKER_TIMES"
"""The variable with the folder into which each worker writes what it has counted."""

_WRITTEN = 2.0  # seconds between two writings: a worker can be killed
_INSIDE = "in a kernel process"
_DEVICE = "in a kernel process: waits for the device"
_ROOT = "between tests, collection, start"


@dataclass
class Spans:
    """Exclusive seconds of wall clock and of this process's CPU time, and calls, by span."""

    wall: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    cpu: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    stack: list[str] = field(default_factory=lambda: [_ROOT])
    at: tuple[float, float] = field(
        default_factory=lambda: (time.perf_counter(), time.process_time())
    )
    written: float = 0.0

    def _turn(self) -> None:
        now = time.perf_counter(), time.process_time()
        self.wall[self.stack[-1]] += now[0] - self.at[0]
        self.cpu[self.stack[-1]] += now[1] - self.at[1]
        self.at = now

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Count the time of the block for that span, less that of spans within it."""
        self._turn()
        self.stack.append(name)
        self.calls[name] += 1
        try:
            yield
        finally:
            self._turn()
            self.stack.pop()

    def move(self, name: str, other: str, wall: float, cpu: float = 0.0) -> None:
        """Count seconds of one span for another; cpu: of another process."""
        self.wall[name] -= wall
        self.wall[other] += wall
        self.cpu[other] += cpu

    def write(self) -> None:
        """Write what was counted so far."""
        self._turn()
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        path = Path(os.environ[FOLDER], f"{worker}.json")
        data = {"wall": self.wall, "cpu": self.cpu, "calls": self.calls} | {"waited": _waited()}
        path.write_text(json.dumps(data), encoding="utf-8")
        self.written = time.monotonic()


def _waited() -> float:
    """Seconds for which this process was ready to run and had no core; 0 if the system does not
    say."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path("/proc/self/schedstat").read_text(encoding="ascii").split()[1]) * 1e-9
    return 0.0


spans = Spans()


def _function(module: str, name: str, label: str) -> None:
    """Make a span of a function, wherever a module has imported it."""
    __import__(module)
    was = vars(sys.modules[module])[name]
    now = _span(was, label)
    for other in list(sys.modules.values()):
        if getattr(other, "__name__", "").startswith(("verify", "tests", "conftest", "references")):
            for key, value in list(vars(other).items()):
                if value is was:
                    setattr(other, key, now)


def _method(kind: type, name: str, label: str) -> None:
    setattr(kind, name, _span(getattr(kind, name), label))


def _span(call: Callable[..., Any], label: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def spanned(*args: Any, **more: Any) -> Any:
        with spans.within(label):
            return call(*args, **more)

    return spanned


def _clock(self: Any, what: str) -> Any:
    """`Clock.timed`, as a span of that step."""

    @contextlib.contextmanager
    def timed() -> Iterator[None]:
        begun = time.perf_counter()
        try:
            with spans.within(f"step {what}"):
                yield
        finally:
            self.add(what, time.perf_counter() - begun)

    return timed()


def _install() -> None:
    from hypothesis.strategies import DataObject

    from verify.campaign.judge import Judge
    from verify.cell.arena_runs import Runs
    from verify.cell.fork_server import ForkServer
    from verify.cell.process import Cell, Reply
    from verify.evidence import Recorder
    from verify.judging.truth import Clock
    from verify.machine.turns import Turns
    from verify.oracles import Oracle

    _method(DataObject, "draw", "draws a problem")
    _function("verify.problem.sampling", "draws", "draws problems to choose from")
    _function("verify.campaign.edge_cases", "edge_cases", "chooses edge cases")
    _function("verify.campaign.edge_cases", "first_cases", "chooses edge cases")
    _function("verify.campaign.covering", "covering", "chooses pairs of levels")
    _function("verify.problem.inputs", "tensors", "inputs")
    _function("verify.problem.inputs", "dout", "inputs")
    _function("verify.problem.inputs", "dequantised", "inputs")
    _function("verify.problem.coverage", "coverage_bins", "bins and the record of a verdict")
    _method(Judge, "_verdict", "bins and the record of a verdict")
    _method(Judge, "judge", "the rest of judging")
    _method(Oracle, "rule", "oracles: comparison, statistics' samples")
    _method(Recorder, "write", "evidence")
    _method(ForkServer, "fork", "a kernel process starts")
    _method(Cell, "load", "a kernel file is loaded")
    _method(Runs, "lay", "arena: canaries, inputs, poison")
    _method(Runs, "read", "arena: outputs")
    _method(Runs, "damages", "arena: search for damage")
    Clock.timed = _clock  # type: ignore[assignment, method-assign]
    asked, shared = Cell._ask, Turns.shared

    def ask(self: Cell, *args: Any, **more: Any) -> Reply:
        message = f"message {args[0]['op']!r}: its way, cores"
        with spans.within(message):
            reply = asked(self, *args, **more)
        spent = reply.data.get("spent")
        if isinstance(spent, list):
            wall, cpu, awaited = spent
            spans.move(message, _INSIDE, wall - awaited, cpu)
            spans.move(message, _DEVICE, awaited)
        if time.monotonic() - spans.written > _WRITTEN:
            spans.write()
        return reply

    @contextlib.contextmanager
    def turn(self: Turns) -> Iterator[None]:
        with contextlib.ExitStack() as room:
            with spans.within("waits for a turn on the GPU"):
                room.enter_context(shared(self))
            yield

    Cell._ask = ask  # type: ignore[method-assign]
    Turns.shared = turn  # type: ignore[method-assign]
    gc.callbacks.append(_collection)


def _collection(phase: str, _: dict[str, int]) -> None:
    spans._turn()
    if phase == "start":
        spans.stack.append("Python's garbage collection")
    elif spans.stack[-1] == "Python's garbage collection":
        spans.stack.pop()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        _install()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    with spans.within("pytest's protocol"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    with spans.within("Hypothesis's engine and the test's body"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, Any, Any]:
    result = yield
    spans.write()
    return result


def table(folder: Path, cases: int) -> str:
    """What all workers of a run have counted: means of a worker, and of a case, in lines."""
    workers = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("gw*.json"))
    ] or [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("main.json")]
    count = len(workers)
    if not count:
        return "no worker has begun"
    sums: dict[str, dict[str, float]] = {
        key: defaultdict(float) for key in ("wall", "cpu", "calls")
    }
    for worker in workers:
        for key, sum_ in sums.items():
            for name, value in worker[key].items():
                sum_[name] += value
    each = max(cases, 1)
    lines = [
        f"{count} workers, {cases} cases; seconds of a worker, milliseconds of a case",
        "   wall s    CPU s   wall ms   CPU ms  calls/case",
    ]
    names = sorted(sums["wall"], key=lambda name: -sums["wall"][name])
    rows = [(name, *(sums[key][name] for key in ("wall", "cpu", "calls"))) for name in names]
    rows.append(("all", *(sum(sums[key].values()) for key in ("wall", "cpu")), 0.0))
    for name, wall, cpu, calls in rows:
        lines.append(
            f"{wall / count:9.2f}{cpu / count:9.2f}{1e3 * wall / each:10.2f}{1e3 * cpu / each:9.2f}"
            f"{calls / each:9.2f}  {name}"
        )
    waited = sum(worker["waited"] for worker in workers)
    lines.append(f"{waited / count:9.2f} s of a worker it was ready and had no core")
    return "\n".join(lines)
