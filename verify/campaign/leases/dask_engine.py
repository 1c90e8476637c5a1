"""Dask distributed as the engine of a campaign.

One lease is one Dask task, bound to the worker that the coordinator chose: Dask carries orders and
evidence, notices workers that come and go, and restarts those that die; which lease goes where, and
what happens to a lost one, is decided by `state`.  A failing verdict is told at once through Dask's
events.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from distributed import Client, Future

from verify.campaign.leases import on_worker
from verify.campaign.leases.engine import (
    Arrived,
    Checked,
    EngineError,
    Fails,
    Gone,
    News,
    Said,
    Told,
    Worked,
)
from verify.campaign.leases.executor import Spec
from verify.campaign.leases.requests import Answer, Check, Hello, Request, Work

_LOOK = 1.0  # seconds between two looks at who is there
_GOODBYE = 10.0  # seconds until workers have ended their sessions
_SILENCE = 30.0  # seconds until a scheduler that does not answer is lost


class DaskEngine:
    """An engine on a scheduler.

    where: its address or scheduler file, for messages.
    """

    def __init__(self, client: Client, campaign: str, where: str) -> None:
        self.client = client
        self.campaign = campaign
        self.where = where
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._there: set[str] = set()
        self._looked = 0.0
        self._number = 0
        self._futures: dict[str, set[Future]] = {}
        client.subscribe_topic(on_worker.topic(campaign), self._heard)

    def news(self, seconds: float) -> Sequence[News]:
        """What has happened; see `Engine`."""
        found: list[News] = []
        if time.monotonic() - self._looked > _LOOK:
            found += self._look()
        with contextlib.suppress(queue.Empty):
            found.append(self._news.get(timeout=0 if found else seconds))
            while True:
                found.append(self._news.get_nowait())
        return found

    def hello(self, worker: str, spec: Spec) -> None:
        """Start a worker's session."""

        def said(result: Any, failed: str) -> News:
            if failed:
                return Said(worker, failed=failed)
            greeting = result.pop("hello", None)
            decoded = None if greeting is None else msgspec.json.decode(greeting, type=Hello)
            return Said(worker, hello=decoded, **result)

        self._submit(worker, said, on_worker.hello, msgspec.json.encode(spec))

    def check(self, worker: str, request: Check) -> None:
        """Let a worker judge the control problem."""
        self._ask(worker, request, lambda answer, evidence: Checked(worker, answer))

    def work(self, worker: str, request: Work) -> None:
        """Give a worker a lease."""
        self._ask(
            worker,
            request,
            lambda answer, evidence: Worked(worker, request.lease, answer, evidence),
        )

    def tell(self, workers: Sequence[str], what: Told, test: str = "") -> None:
        """Tell the sessions of workers something, while they are at work."""
        there = [worker for worker in workers if worker in self._there]
        if there:
            with contextlib.suppress(OSError, ValueError):
                self.client.run(
                    on_worker.tell,
                    self.campaign,
                    what,
                    test,
                    workers=there,
                    wait=False,
                    on_error="ignore",
                )

    def close(self) -> None:
        """Forget what is under way, end the sessions of this campaign, and disconnect."""
        with contextlib.suppress(Exception):  # the scheduler can be gone
            for futures in self._futures.values():
                self.client.cancel(list(futures), force=True)
        ends = threading.Thread(target=self._end, daemon=True)
        ends.start()
        ends.join(_GOODBYE)
        with contextlib.suppress(Exception):
            self.client.close(timeout=5)

    def _end(self) -> None:
        """End the sessions of this campaign, on workers that live on."""
        with contextlib.suppress(Exception):
            self.client.run(
                on_worker.tell,
                self.campaign,
                "end",
                "",
                workers=sorted(self._there),
                on_error="ignore",
            )

    def _look(self) -> list[News]:
        """Workers that came or went."""
        begun = time.monotonic()
        while True:
            try:
                there = set(self.client.nthreads())
                break
            except (OSError, TimeoutError, RuntimeError, ValueError) as error:
                if time.monotonic() - begun > _SILENCE or self.client.status == "closed":
                    raise EngineError(
                        f"the scheduler at {self.where} does not answer ({type(error).__name__});"
                        " the same command goes on with the campaign"
                    ) from None
                time.sleep(_LOOK)
        gone = sorted(self._there - there)
        new = sorted(there - self._there)
        self._there = there
        self._looked = time.monotonic()
        for worker in gone:
            self.client.cancel(list(self._futures.pop(worker, ())), force=True)
        return [*(Gone(worker) for worker in gone), *(Arrived(worker) for worker in new)]

    def _ask(self, worker: str, request: Request, told: Callable[[Answer, bytes], News]) -> None:
        def answered(result: Any, failed: str) -> News:
            if failed:
                return told(Answer(errors=(("", "", failed),)), b"")
            answer, evidence = result
            return told(msgspec.json.decode(answer, type=Answer), zlib.decompress(evidence))

        data = msgspec.json.encode(request)
        self._submit(worker, answered, on_worker.ask, self.campaign, data)

    def _submit(
        self, worker: str, told: Callable[[Any, str], News], function: Any, *given: Any
    ) -> None:
        """Run a function on a worker; its result, or why there is none, becomes news."""
        self._number += 1
        future = self.client.submit(
            function,
            *given,
            key=f"{self.campaign}-{self._number}-{time.time_ns()}",
            workers=[worker],
            allow_other_workers=False,
            retries=0,
            pure=False,
        )
        self._futures.setdefault(worker, set()).add(future)

        def ended(future: Future) -> None:
            self._futures.get(worker, set()).discard(future)
            if future.status == "finished":
                try:
                    self._news.put(told(future.result(), ""))
                except Exception as error:  # of the transfer, or of Dask's
                    self._news.put(told(None, f"{type(error).__name__}: {error}"))
            elif future.status == "error":
                raised = future.exception()
                self._news.put(told(None, f"{type(raised).__name__}: {raised}"))

        future.add_done_callback(ended)

    def _heard(self, event: tuple[float, Any]) -> None:
        """A failing verdict, from a worker."""
        message = event[1]
        if isinstance(message, dict) and "line" in message:
            self._news.put(Fails(str(message["worker"]), bytes(message["line"])))
