"""Times the calls of an entry point in a kernel process, on inputs that the process draws itself.

On a GPU each call lies between two events of the current stream, behind a flush of the L2 cache.
The flush is repeated until it takes longer than the host needs to launch the call: the device is
then still busy when the call is queued, so that the host's time does not count.  On a CPU
perf_counter is read around each call, and nothing is flushed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verify.cell.arena import torch_dtype
from verify.cell.breach import Breach
from verify.cell.launching import arguments_of, bound, buffers_of
from verify.problem.storage import parse_storage
from verify.variant import Variant, Workspace

VALUES = 4  # shown of the first and of the last row of a result
_FLUSH = 4  # times the L2 cache
_NO_L2 = 64 << 20  # bytes, where torch does not know the cache's size
_MOST_FLUSHES = 64  # before one call
_TRIES = 3
_WAKE = 1e-4  # seconds that a wait for an idle device can take
_LATE = 0.2  # of a call's time

Call = Callable[[], None]


def times(variant: Variant, message: dict[str, Any]) -> dict[str, Any]:
    """Time calls of the entry that the message names; raises what the kernel raises, and Breach if
    its work leaves the current stream.

    message: that of a run, and `timing`: {seed, calls, warmups, least, seconds}.  There are `calls`
    timed calls after `warmups`, or as many as `seconds` allow with at least `least` of them, after
    a quarter as many.
    Returns {seconds: of each call, warmups, flushed: bytes of the cache, names: of the result,
    first, last: VALUES of its first and of its last row as text, rms: of these two rows}.
    """
    device, rules = torch.device(message["device"]), message["timing"]
    arena = torch.empty(message["size"], dtype=torch.uint8, device=device)
    buffers = buffers_of(message, arena)
    _draw(message, buffers, rules["seed"])
    if message["entry"] == "backward" and variant.entry("saved")[0] is not None:
        saving = message | {"entry": "saved"}
        bound(variant, saving, buffers, _workspace(variant, saving, buffers))()
    call = bound(variant, message, buffers, _workspace(variant, message, buffers))
    call()  # compiles
    _wait(device)
    if device.type == "cuda":
        _check_stream(call)
    begun = time.perf_counter()
    call()
    host = time.perf_counter() - begun
    _wait(device)
    one = max(time.perf_counter() - begun, 1e-9)
    calls = min(rules["calls"], max(rules["least"], int(rules["seconds"] / one)))
    warmups = min(rules["warmups"], max(1, calls // 4))
    flush = _Flush(device)
    if device.type == "cuda":
        seconds = _by_events(call, warmups, calls, flush, host)
    else:
        seconds = _by_clock(call, warmups, calls)
    result = buffers["dv" if message["entry"] == "backward" else "out"]
    return {"seconds": seconds, "warmups": warmups, "flushed": flush.cache, **_shown(result)}


def _check_stream(call: Call) -> None:
    """Raise Breach if the device is still busy when the current stream is done with a call: the
    events would not count what goes on."""
    ratios = []
    for _ in range(_TRIES):
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        begun = time.perf_counter()
        call()
        done.record()
        done.synchronize()
        stream = time.perf_counter()
        torch.cuda.synchronize()
        ratios.append((time.perf_counter() - stream - _WAKE) / (stream - begun))
    if min(ratios) > _LATE:
        raise Breach("its work goes on when the current stream is done with it")


class _Flush:
    """Writes zeros over several times the L2 cache of a GPU; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.cache = 0
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self.cache = getattr(properties, "L2_cache_size", 0) or _NO_L2
        self._bytes = torch.empty(_FLUSH * self.cache, dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        self._bytes.zero_()


def _by_clock(call: Call, warmups: int, calls: int) -> list[float]:
    seconds = []
    for _ in range(warmups + calls):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return seconds[warmups:]


def _by_events(call: Call, warmups: int, calls: int, flush: Call, host: float) -> list[float]:
    """host: seconds that the host needs to launch the call."""
    flush()  # the first one loads its kernel
    alone = min(_events(flush, _TRIES, lambda: None))
    flushes = min(_MOST_FLUSHES, max(1, math.ceil(2 * host / max(alone, 1e-6))))

    def flushed() -> None:
        for _ in range(flushes):
            flush()

    return _events(call, warmups + calls, flushed)[warmups:]


def _events(call: Call, calls: int, before: Call) -> list[float]:
    pairs = []
    for _ in range(calls):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before()
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e-3 for start, end in pairs]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _draw(message: dict[str, Any], buffers: dict[str, Tensor], seed: int) -> None:
    """Normal values in inputs, the same for every kernel; 1 in factors, NaN in all else."""
    device = torch.device(message["device"])
    draw = torch.Generator(device).manual_seed(seed)
    stored = message.get("stored", {})
    drawn = set()
    for name in ("q", "k", "v", "dout"):
        if name in stored:
            views = {of: buffers[slot] for of, slot in stored[name]["slots"].items()}
            values = torch.randn(stored[name]["shape"], generator=draw, device=device)
            parse_storage(stored[name]["name"]).write(values, views)
            drawn.update(stored[name]["slots"].values())
        elif name in buffers:
            buffers[name].copy_(torch.randn(buffers[name].shape, generator=draw, device=device))
            drawn.add(name)
    for name in buffers.keys() - drawn:
        tensor = buffers[name]
        for dim, stride in enumerate(tensor.stride()):
            tensor = tensor if stride else tensor.narrow(dim, 0, 1)  # one element, shown often
        tensor.fill_(1.0 if name.startswith("descale_") else math.nan)


def _workspace(variant: Variant, message: dict[str, Any], buffers: dict[str, Tensor]) -> Workspace:
    """The scratch buffers that the entry wants, uninitialised."""
    workspace_of = variant.entry(message["entry"])[1]
    if workspace_of is None:
        return {}
    wanted = workspace_of(arguments_of(message, variant, buffers))
    return {
        name: torch.empty(shape, dtype=torch_dtype(dtype), device=message["device"])
        for name, (shape, dtype) in wanted.items()
    }


def _shown(result: Tensor) -> dict[str, Any]:
    """Values as text: JSON has no NaN."""
    rows = [result[0, 0, 0].double().cpu(), result[-1, -1, -1].double().cpu()]
    first, last = ([repr(value) for value in row[:VALUES].tolist()] for row in rows)
    rms = [repr(row.square().mean().sqrt().item()) for row in rows]
    return {"first": first, "last": last, "rms": rms}
