"""Figures of docs/scale.md: `python -m tests.harness.simulated_scale` in a checkout.

coordinator: what a lease costs the coordinator, over simulated workers in simulated time; its work
on the state, the journal and the evidence is real.  stragglers: how much longer a campaign takes
than its work, shared out evenly.  dask: leases that do nothing, through a scheduler and workers in
this process: what Dask and the coordinator cost together, on this machine's cores.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from tests.harness.simulated_engine import SLUG, Simulated, header, units
from verify.campaign.leases import on_worker
from verify.campaign.leases.coordinator import Coordinator, Plan
from verify.campaign.leases.engine import Engine
from verify.campaign.leases.executor import Spec
from verify.campaign.leases.merged import Merged
from verify.campaign.leases.requests import Answer, Check, Hello, Request, Work
from verify.campaign.leases.state import Leases

_REQUEST = msgspec.json.Decoder(Request)
_LINE = json.dumps({"kind": "verdict", "outcome": "pass", "measures": {"r_out": 0.123456789}})
EVIDENCE = 60_000  # bytes of a lease: 20 cases with 3 oracles, 1 kB a line
_LINES = (_LINE + " " * (999 - len(_LINE)) + "\n").encode() * (EVIDENCE // 1000)
TESTS = 400


@dataclass(frozen=True)
class Figures:
    """Of one campaign: leases, seconds of this machine, and of the campaign's own clock."""

    leases: int
    seconds: float
    clock: float

    @property
    def each(self) -> float:
        """Milliseconds a lease."""
        return 1e3 * self.seconds / self.leases


def plan(leases: int) -> Plan:
    """A campaign of about so many leases."""
    seeds = tuple(range(max(leases // TESTS, 1)))
    return Plan(spec=Spec(campaign="s", arguments=()), seeds=seeds, sources="same")


def ran(engine: Engine, leases: int, clock: Callable[[], float]) -> Figures:
    """Run a campaign to its end."""
    with tempfile.TemporaryDirectory() as folder:
        merged = Merged(Path(folder) / "s", Path(folder) / "runs")
        coordinator = Coordinator(plan(leases), merged, engine, clock=clock)
        coordinator.open()
        began = time.perf_counter()
        started = clock()
        coordinator.run()
        seconds = time.perf_counter() - began
        coordinator.close()
        assert coordinator.state.open == 0
        size = sum(path.stat().st_size for path in merged.run(SLUG).glob("device-*"))
        assert size >= len(coordinator.state.all) * len(_LINES)
        return Figures(len(coordinator.state.all), seconds, clock() - started)


def simulated(
    workers: int, leases: int, seconds: Callable[[random.Random], float], slow: int = 0
) -> Figures:
    """A campaign over simulated workers, so many of which are ten times slower than the others."""
    engine = Simulated(
        workers=workers,
        tests=units(TESTS, families=40),
        seconds=seconds,
        evidence=lambda order: _LINES,
        slow={f"w{n}": 10.0 for n in range(slow)},
    )
    return ran(engine, leases, engine.clock)


def usual(draw: random.Random) -> float:
    """Seconds of a lease: most take a few, one in 50 half a minute."""
    return 30.0 if draw.random() < 0.02 else draw.uniform(1.0, 8.0)


def hello(spec: bytes) -> dict[str, Any]:
    """In place of `on_worker.hello`."""
    from distributed import get_worker

    name = str(get_worker().name)
    greeting = Hello(
        device={"slug": SLUG},
        uuid=f"GPU-{name}",
        units=units(TESTS, families=40),
        kernels="kernels",
        sources="same",
    )
    said = {"host": "host", "name": name, "pid": 0, "header": header()}
    return {**said, "hello": msgspec.json.encode(greeting)}


def ask(campaign: str, request: bytes) -> tuple[bytes, bytes]:
    """In place of `on_worker.ask`: a lease that does nothing."""
    asked = _REQUEST.decode(request)
    work = isinstance(asked, Work)
    assert work or isinstance(asked, Check)
    return msgspec.json.encode(Answer(seconds=0.0)), zlib.compress(_LINES if work else b"", 1)


def over_dask(workers: int, leases: int) -> Figures:
    """A campaign over Dask workers in this process."""
    import dask.config
    from distributed import Client, LocalCluster

    from verify.campaign.leases.dask_engine import DaskEngine

    real = on_worker.hello, on_worker.ask
    here = import_module("tests.harness.simulated_scale")  # not __main__, which cannot be pickled
    on_worker.hello, on_worker.ask = here.hello, here.ask
    try:
        with (
            dask.config.set({"distributed.worker.profile.enabled": False}),
            LocalCluster(
                n_workers=workers,
                processes=False,
                threads_per_worker=1,
                memory_limit=0,
                dashboard_address="127.0.0.1:0",
                worker_dashboard_address=None,
                silence_logs=50,
            ) as cluster,
            Client(cluster, set_as_default=False) as client,
        ):
            engine = DaskEngine(client, "s", "here")
            return ran(engine, leases, time.monotonic)
    finally:
        on_worker.hello, on_worker.ask = real


def resumed(leases: int) -> float:
    """Seconds to make the state again from the journal of a campaign of so many leases."""
    from verify.campaign.leases import journal

    with tempfile.TemporaryDirectory() as folder:
        engine = Simulated(workers=200, tests=units(TESTS, families=40), evidence=lambda order: b"")
        merged = Merged(Path(folder) / "s", Path(folder) / "runs")
        coordinator = Coordinator(plan(leases), merged, engine, clock=engine.clock)
        coordinator.open()
        coordinator.run()
        coordinator.close()
        began = time.perf_counter()
        state = Leases()
        for event in journal.read(merged.directory):
            state.apply(event)
        assert len(state.done) == len(state.all)
        return time.perf_counter() - began


def main() -> None:
    """Print the figures; arguments: names of those wanted, by default all."""
    wanted = sys.argv[1:] or ["coordinator", "stragglers", "resume", "dask"]
    for workers in (8, 50, 200) if "coordinator" in wanted else ():
        one = simulated(workers, 20_000, usual)
        rate = one.leases * len(_LINES) / one.seconds / 1e6
        print(f"coordinator, {workers} workers: {one.each:.3f} ms a lease, {rate:.0f} MB/s merged")
    for workers, slow in ((200, 0), (200, 4)) if "stragglers" in wanted else ():
        one = simulated(workers, 8_000, usual, slow)
        even = 8_000 * (0.98 * 4.5 + 0.02 * 30) / (workers - slow + slow / 10)
        print(f"{workers} workers, {slow} slow: {one.clock:.0f} s; evenly {even:.0f} s")
    if "resume" in wanted:
        print(f"a journal of 20000 leases is read in {resumed(20_000):.2f} s")
    for workers in (1, 8, 50, 200) if "dask" in wanted else ():
        one = over_dask(workers, 2_000)
        print(f"dask, {workers} workers: {one.each:.2f} ms a lease", flush=True)


if __name__ == "__main__":
    main()
