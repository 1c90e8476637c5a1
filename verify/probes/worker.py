"""Runs probes in separate processes, so that a crash, a hang or a broken CUDA context of one does
not affect the others.

A process runs one job after the other.  After a failure the next job gets a fresh process.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_START = 60.0  # seconds for a process to start on a busy machine


@dataclass(frozen=True)
class Job(Generic[T]):
    """A module's function and its arguments, which are pickled.  A result with a true attribute
    `error` counts as a failure."""

    function: Callable[..., T]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Answer(Generic[T]):
    """A job's result, or why it has none."""

    result: T | None = None
    failure: str = ""


class JobError(RuntimeError):
    """A job has no result; the message says how it ended."""


def do_all(jobs: Sequence[Job[T]], processes: int, patience: float) -> Iterator[Answer[T]]:
    """Yield every job's answer in order, as soon as it is available.

    processes: jobs at the same time.  patience: seconds for each job.
    """
    local = threading.local()
    workers: list[_Worker] = []

    def run_job(job: Job[T]) -> Answer[T]:
        if not hasattr(local, "worker"):
            local.worker = _Worker()
            workers.append(local.worker)
        try:
            return Answer(local.worker.do(job, patience))
        except JobError as error:
            return Answer(failure=str(error))

    with ThreadPoolExecutor(processes) as pool:
        try:
            yield from pool.map(run_job, jobs)
        finally:
            pool.shutdown(cancel_futures=True)
            for worker in workers:
                worker.end()


class _Worker:
    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    def do(self, job: Job[T], patience: float) -> T:
        """The job's result.  Raises JobError."""
        pipe = self._begin()
        try:
            pipe.send(job)
            if not pipe.poll(patience):
                raise JobError(f"no answer within {patience:g} s; killed")
            good, result = pipe.recv()
        except (EOFError, OSError):
            code = self._join()
            raise JobError(f"its process ended with status {code}") from None
        except JobError:
            self.end()
            raise
        if not good:
            self.end()
            raise JobError(str(result))
        if getattr(result, "error", ""):
            self.end()
        answer: T = result
        return answer

    def _begin(self) -> Connection:
        if self._pipe is None:
            context = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
            self._pipe, child_end = context.Pipe()
            self._process = context.Process(target=_serve, args=(child_end,), daemon=True)
            self._process.start()
            child_end.close()
            with suppress(EOFError, OSError):
                if self._pipe.poll(_START):
                    self._pipe.recv()
        return self._pipe

    def _join(self) -> int | None:
        assert self._process is not None
        self._process.join(10)
        code = self._process.exitcode
        self.end()
        return code

    def end(self) -> None:
        """Kill the process, if there is one."""
        if self._process is not None and self._pipe is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process = self._pipe = None


def _serve(pipe: Connection) -> None:
    pipe.send("ready")
    with suppress(EOFError):
        while True:
            job = pipe.recv()
            try:
                answer = True, job.function(*job.arguments)
            except Exception as error:
                answer = False, f"{type(error).__name__}: {error}"
            pipe.send(answer)
