"""The watch of a session's first process: every GPU of its workers judges the control problem.

It does so when its first worker starts, after a failing test, every minute, and at the end if a
test has failed since or a minute has passed.  A GPU that has it wrong is quarantined: its
evidence is taken out of the run, and the session ends.  `verify run` then begins another session of
the run on the other GPUs, which judges what is missing.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec
import pytest

from verify.bundle import for_children
from verify.campaign import halt
from verify.campaign.gpus import state
from verify.campaign.gpus.control_process import Answer
from verify.campaign.gpus.placement import NoGpuError, leave_out
from verify.machine import device, starter
from verify.machine.places import state_directory

_MODULE = "verify.campaign.gpus.control_process"
_EVERY = 60.0  # seconds between two control problems of a GPU: the end seldom waits for one
_APART = 30.0  # seconds between two that failing tests ask for
_RECENT = 60.0  # seconds for which a control problem speaks for what follows it
_PATIENCE = 45.0  # seconds until one that has no answer is given up at the end
_POLL = 0.05  # seconds


class Control(Protocol):
    """A control problem under way."""

    def answer(self) -> Answer | None:
        """What it found; None while it is under way."""

    def end(self) -> None:
        """Give it up."""


@dataclass
class ControlProcess:
    """A control problem in a process of its own, on one GPU."""

    process: starter.Process
    output: IO[bytes]

    @staticmethod
    def start(gpu: str) -> ControlProcess:
        """Begin on a GPU."""
        seed = (sum(gpu.encode()) + time.time_ns() // 1_000_000) % (1 << 31)
        output = tempfile.TemporaryFile()  # noqa: SIM115 - `answer` or `end` closes it
        program = starter.Program(
            module=_MODULE,
            arguments=[str(seed)],
            environment=for_children({**os.environ, "CUDA_VISIBLE_DEVICES": gpu}),
            output=output.fileno(),
            leashed=True,
        )
        return ControlProcess(starter.launch(starter.JUDGES, program), output)

    def answer(self) -> Answer | None:
        """What it found; a process that died without a word found nothing."""
        if self.process.poll() is None:
            return None
        with self.output as output:
            output.seek(0)
            said = output.read().splitlines()
        with contextlib.suppress(msgspec.MsgspecError, IndexError):
            return msgspec.json.decode(said[-1], type=Answer)
        return Answer(made=False)

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        self.output.close()


@dataclass
class _Watched:
    """One GPU of the session.

    began: when its last control problem did.  accused: whether a test has failed since.
    """

    began: float
    control: Control | None = None
    accused: bool = False


class Watch:
    """run: its directory.  start: begins a control problem on a GPU.  clock: in seconds."""

    def __init__(
        self,
        run: Path,
        start: Callable[[str], Control] = ControlProcess.start,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = run
        self.wrong: dict[str, str] = {}
        self._start = start
        self._clock = clock
        self._gpus: dict[str, _Watched] = {}

    # Hooks

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """A worker of pytest-xdist is about to start."""
        self.join(gpu_of(node.gateway.id))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> None:
        """Without such workers, this process is the only one."""
        if not self._gpus:
            self.join(device.own())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A failing test accuses its GPU."""
        node = getattr(report, "node", None)
        if report.failed:
            self.accuse(device.own() if node is None else gpu_of(node.gateway.id))
        self.look()

    # Decisions

    def join(self, gpu: str) -> None:
        """A worker has that GPU; "": none."""
        if gpu and gpu not in self._gpus:
            self._gpus[gpu] = _Watched(self._clock(), self._start(gpu))

    def accuse(self, gpu: str) -> None:
        """A test failed on that GPU."""
        if gpu in self._gpus:
            self._gpus[gpu].accused = True

    def look(self) -> None:
        """Take the answers that there are, and begin what is due."""
        for gpu, each in self._gpus.items():
            self._take(gpu, each)
            since = self._clock() - each.began
            if since > _EVERY or (each.accused and since > _APART):
                self._begin(gpu, each)

    def finish(self) -> str:
        """Let each GPU that should judge the control problem once more; take out what quarantined
        ones recorded.  Returns a line for each, "" if there is none.

        Call it when no worker judges any more.
        """
        until = self._clock() + _PATIENCE
        self._wait(until)
        for gpu, each in self._gpus.items():
            if each.accused or self._clock() - each.began > _RECENT:
                self._begin(gpu, each)
        self._wait(until)
        for each in self._gpus.values():
            if each.control is not None:
                each.control.end()
        state.take_out(self.run)
        return "\n".join(f"{gpu} is quarantined: {why}" for gpu, why in self.wrong.items())

    def _begin(self, gpu: str, each: _Watched) -> None:
        if each.control is None and gpu not in self.wrong:
            each.control, each.began, each.accused = self._start(gpu), self._clock(), False

    def _wait(self, until: float) -> None:
        while self._clock() < until:
            for gpu, each in self._gpus.items():
                self._take(gpu, each)
            if all(each.control is None for each in self._gpus.values()):
                return
            time.sleep(_POLL)

    def _take(self, gpu: str, each: _Watched) -> None:
        answer = None if each.control is None else each.control.answer()
        if answer is None:
            return
        each.control = None
        if not answer.made:
            return
        known = state.read(self.run)
        before = known.get(gpu, state.Gpu())
        if answer.wrong:
            self.wrong[gpu] = answer.wrong
            known[gpu] = msgspec.structs.replace(before, quarantined=answer.wrong)
        else:
            known[gpu] = msgspec.structs.replace(before, controls=before.controls + 1)
        self.run.mkdir(parents=True, exist_ok=True)
        state.write(self.run, known)
        if answer.wrong:
            (self.run / state.MARKER).touch()


_WATCH: pytest.StashKey[Watch] = pytest.StashKey()


def choose_gpus(config: pytest.Config) -> None:
    """Hide the GPUs that the session of a run is not to use, in its first process, before CUDA
    starts.  Raises pytest.UsageError if none is left."""
    run_id = config.getoption("--run-id")
    if run_id is not None and not hasattr(config, "workerinput"):
        try:
            leave_out(state_directory() / "runs" / run_id)
        except NoGpuError as error:
            raise pytest.UsageError(str(error)) from None


def watch_gpus(config: pytest.Config, run: Path) -> None:
    """End this process's part of a run once a GPU is quarantined; the first process of a session
    watches over all GPUs.  In a session that does leases, the coordinator does so."""
    marker = run.absolute() / state.MARKER
    halt.stop_at_quarantine(marker)
    leases = hasattr(config.option, "lease_socket")
    if not (hasattr(config, "workerinput") or config.option.collectonly or leases):
        marker.unlink(missing_ok=True)
        config.stash[_WATCH] = Watch(run)
        config.pluginmanager.register(config.stash[_WATCH], "verify-gpus")


def wrong_gpus(config: pytest.Config) -> str:
    """A line for each GPU that this session has quarantined; "" if there is none.  See
    `Watch.finish`."""
    watch = config.stash.get(_WATCH, None)
    return "" if watch is None else watch.finish()


def gpu_of(worker: str) -> str:
    """The GPU that a worker of pytest-xdist has, by its name; "" if it has none."""
    mask = device.gpus_for(worker)
    return device.own() if mask is None else mask.partition(",")[0] if device.gpus() else ""
