"""The order of a timed call on a GPU, seen on a fake one: flushes that outlast the host, an event,
the call, an event."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from verify.cell import stopwatch
from verify.cell.arena import plan
from verify.cell.breach import Breach
from verify.cell.launching import buffers_of
from verify.timing.workloads import Workload


@dataclass
class Device:
    """A stream that does one thing after the other, in microseconds, and a clock of the host.

    behind: how long the device works on another stream after a call.
    """

    log: list[str] = field(default_factory=list)
    stream: float = 0.0
    host: float = 0.0
    behind: float = 0.0

    def queue(self, what: str, device: float, host: float) -> None:
        self.log.append(what)
        self.host += host
        self.stream = max(self.stream, self.host) + device

    def synchronize(self) -> None:
        self.host = max(self.host, self.stream + self.behind)


class Event:
    device: Device

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.device.queue("event", 0, 1)
        self.at = self.device.stream

    def synchronize(self) -> None:
        self.device.host = max(self.device.host, self.at)

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e-3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    monkeypatch.setattr(Event, "device", made, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: made.host * 1e-6)
    return made


def test_the_hosts_time_does_not_count(device: Device) -> None:
    """A kernel of 10 us that takes the host 200 us to launch; a flush takes 80 us."""
    seconds = stopwatch._by_events(
        lambda: device.queue("call", 10, 200), 2, 4, lambda: device.queue("flush", 80, 5), 200e-6
    )
    assert seconds == pytest.approx([10e-6] * 4)
    # 400 us of flushes before a call that takes 200 us to launch
    once = ["flush"] * 5 + ["event", "call", "event"]
    assert device.log[10:] == once * 6  # after the flushes that are timed


def test_factors_of_quantised_inputs_are_one() -> None:
    """One factor per tensor is one element, which a view of all heads shows."""
    workload = Workload(batch=2, heads=3, seqlen=16, head_dim=16)
    for word in ("tensor", "head"):
        where = plan(workload.problem("float8_e4m3fn", word), lse=True, workspace={})
        message = {"slots": where.as_data(), "device": "cpu"}
        buffers = buffers_of(message, torch.empty(where.size, dtype=torch.uint8))
        stopwatch._draw(message, buffers, 1)
        for name in "qkv":
            assert bool((buffers[f"descale_{name}"] == 1).all()), word
            assert bool(buffers[name].float().isfinite().all())
        assert bool(buffers["out"].isnan().all())


def test_work_that_leaves_the_stream_is_refused(device: Device) -> None:
    stopwatch._check_stream(lambda: device.queue("call", 1000, 10))
    device.behind = 1000
    with pytest.raises(Breach, match="current stream"):
        stopwatch._check_stream(lambda: device.queue("call", 1000, 10))
