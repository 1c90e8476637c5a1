"""A kernel process: it loads kernel files, maps the judge's arena and runs kernels in it until its
socket closes.  Nothing here knows a Problem, a reference or a test."""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verify.cell import device_waits, stopwatch, ways
from verify.cell.breach import Breach, Undeclared
from verify.cell.building import compile_build
from verify.cell.concurrent import Streams, run_concurrently
from verify.cell.device_memory import DeviceMemory, exhausted, unavailable
from verify.cell.launching import arguments_of, buffers_of, launch, running
from verify.cell.layout_twins import LAYOUTS, twin
from verify.cell.loading import line_of, load
from verify.cell.preloading import preload
from verify.cell.protocol import Closed, receive, send
from verify.cell.sources import LateImports
from verify.cell.ways import SharedInputs
from verify.variant import Build, Unsupported, Variant, arch_of

# Requests in which only the judge's code can raise, except inside a kernel's entry point.
_JUDGE_REQUESTS = ("run", "several", "arena", "device")
_MIN_DEVICE_ARENA = 16 << 20  # bytes; a smaller arena on the device is not worth freeing
_MAX_EXCESS = 4  # times the needed size; a larger arena on the device is freed


class KernelProcess:
    """One kernel process: its socket, its loaded variants and the mapped arena."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.variants: dict[str, Variant] = {}
        self.host = torch.empty(0, dtype=torch.uint8)
        self.device_bytes: Tensor | None = None
        self.pinned = False
        self.streams: Streams | None = None
        self.memory = DeviceMemory()
        self.room: dict[str, int] = {}
        self.poisoned = False
        self.imports = LateImports()
        self.awaited = 0.0  # seconds for which this request has waited for the device

    def serve(self) -> None:
        """Answer requests until the judge closes the connection."""
        device_waits.choose()
        with contextlib.suppress(Closed):
            while True:
                message, fds = receive(self.sock, 1)
                begun, spent, self.awaited = time.perf_counter(), time.process_time(), 0.0
                running.kernel_code = message["op"] not in _JUDGE_REQUESTS
                try:
                    reply = self._answer(message, fds)
                    if message["op"] in ("run", "several"):
                        self.imports.check()
                except Unsupported as refusal:
                    reply = {
                        "status": "unsupported",
                        "argument": refusal.argument,
                        "reason": refusal.reason,
                    }
                except Breach as breach:
                    reply = {"status": "breach", "message": str(breach)}
                    reply |= {"undeclared": isinstance(breach, Undeclared)}
                except (Exception, SystemExit, KeyboardInterrupt) as error:
                    reply = self._crowded_out(error) or {
                        "status": "raised",
                        "message": f"{type(error).__name__}: {_first_line(error)}",
                        "where": line_of(error, str(message.get("path"))),
                        "traceback": _trim(traceback.format_exc()),
                        # An error on a device appears only after the launch.
                        "judge": not (running.kernel_code or self.poisoned),
                    }
                # Where the time of a message goes: docs/performance.md.
                taken = time.perf_counter() - begun, time.process_time() - spent, self.awaited
                about = {"poisoned": self.poisoned, "request": message.get("request")}
                send(self.sock, reply | about | {"spent": taken})

    def _crowded_out(self, error: BaseException) -> dict[str, Any] | None:
        """The reply if memory ran out, or if the device lets this process not begin; else None.

        "on_device": not the host's memory; "room" and "total": what the device had, where it could
        be asked.  A device that could be asked has let the process begin.
        """
        if not self.room and unavailable(error):
            return {"status": "device busy", "message": _first_line(error), "on_device": True}
        if not exhausted(error):
            return None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            with contextlib.suppress(RuntimeError):  # where the device itself is broken
                torch.cuda.empty_cache()
        message = _first_line(error) or type(error).__name__
        on_device = not isinstance(error, MemoryError)
        return {"status": "out of memory", "message": message, "on_device": on_device} | self.room

    def _answer(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        match message["op"]:
            case "load":
                loaded = load(Path(message["path"]), message["package_root"])
                names = {each.name: each for each in (*loaded.variants, *loaded.twins)}
                self.variants.update(names)
                self.imports.loaded(Path(message["path"]).resolve(), loaded.sources)
                extra = {"undeclared": loaded.undeclared, "interpreted": loaded.interpreted}
                described = [
                    variant.describe()
                    | extra
                    | {"twins": [each for each in LAYOUTS if twin(variant.name, each) in names]}
                    for variant in loaded.variants
                ]
                files = {"sources": list(loaded.sources), "needed": list(loaded.needed)}
                return {"status": "ok", "variants": described} | files
            case "device":
                return {"status": "ok", "arch": _arch()}
            case "arena":
                self._map(fds[0], message["capacity"])
                return {"status": "ok"}
            case "workspace":
                variant = self.variants[message["variant"]]
                buffers = buffers_of(message, torch.empty(0, dtype=torch.uint8, device="meta"))
                workspace_of = variant.entry(message["entry"])[1]
                wanted = (
                    workspace_of(arguments_of(message, variant, buffers))
                    if workspace_of is not None
                    else {}
                )
                for name in wanted:
                    if not str(name).isprintable():
                        raise Breach(
                            f"workspace: {name!r} is not a name: use letters, digits and _"
                        )
                return {
                    "status": "ok",
                    "workspace": {
                        name: [list(shape), dtype] for name, (shape, dtype) in wanted.items()
                    },
                }
            case "builds":
                return {"status": "ok", "builds": [build.name for build in self._builds(message)]}
            case "compile":
                build = next(
                    build for build in self._builds(message) if build.name == message["build"]
                )
                built = compile_build(build, disassemble=message["disassemble"])
                return {"status": "ok", "built": built}
            case "time":
                return {"status": "ok"} | self._time(message)
            case "run" if message.get("concurrent"):
                return {"status": "ok"} | self._run_concurrently(message)
            case "run":
                return {"status": "ok"} | self._run(message)
            case "several":
                return {"status": "ok"} | self._run_several(message)
        raise ValueError(f"unknown request {message['op']!r}")

    def _builds(self, message: dict[str, Any]) -> Sequence[Build]:
        variant = self.variants[message["variant"]]
        return variant.builds(message["arch"]) if variant.builds is not None else ()

    def _map(self, fd: int, capacity: int) -> None:
        if self.pinned:
            # Before the memory is unmapped: the next mapping can have the same address, and CUDA
            # would treat it as pinned already.
            torch.cuda.cudart().cudaHostUnregister(self.host.data_ptr())  # type: ignore[no-untyped-call]
        memory = mmap.mmap(fd, capacity)
        os.close(fd)
        self.host = torch.frombuffer(memory, dtype=torch.uint8)
        self.device_bytes = None
        self.pinned = torch.cuda.is_available() and self._pin(capacity)

    def _pin(self, capacity: int) -> bool:
        """Pin the arena's memory, for faster copies; returns whether that worked.  Unpinned memory
        works too."""
        status = torch.cuda.cudart().cudaHostRegister(self.host.data_ptr(), capacity, 0)  # type: ignore[no-untyped-call]
        if int(status):
            print(f"the arena could not be pinned: {status}", flush=True)
            # CUDA keeps the error for the next call, which must not be the kernel's.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")
        return not int(status)

    def _time(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            return stopwatch.times(self.variants[message["variant"]], message)
        except RuntimeError:  # on a device, whatever follows in this process would fail too
            self.poisoned = message["device"] != "cpu"
            raise
        finally:
            if message["device"] != "cpu":
                torch.cuda.empty_cache()  # other kernels are timed next

    def _run(self, message: dict[str, Any]) -> dict[str, Any]:
        with self._on_device(message) as arena:
            run = partial(launch, self.variants[message["variant"]], message, arena)
            if message.get("way"):
                reply = ways.run(message, arena, run)
                self.poisoned = "why" in reply
                return reply
            return run() or {} if message["device"] == "cpu" else self.memory.watch(run)

    def _run_several(self, message: dict[str, Any]) -> dict[str, Any]:
        """Launch one after another until `budget` seconds have passed; "kept": what each launch
        kept of the device's memory.  One wait for the device serves all of them."""
        begun = time.monotonic()
        kept: list[int] = []
        on_cpu = message["device"] == "cpu"
        if not on_cpu:
            self._device_arena(max(each["size"] for each in message["launches"]))
        with contextlib.nullcontext() if on_cpu else self._awaited():
            for each in message["launches"]:
                if kept and time.monotonic() - begun > message["budget"]:
                    break
                running.kernel_code = False
                host = self.host[each["begin"] : each["begin"] + each["size"]]
                with self._in_place(host) if on_cpu else self._copied(host) as arena:
                    run = partial(launch, self.variants[each["variant"]], each, arena)
                    kept.append(_unwatched(run) if on_cpu else self.memory.kept(run))
        return {"kept_by": kept, "taken": 0 if on_cpu else self.memory.taken()}

    def _run_concurrently(self, message: dict[str, Any]) -> dict[str, Any]:
        self.streams = self.streams or Streams()
        size = message["size"]
        with self._on_device(message | {"size": size * message["concurrent"]}) as arena:
            arenas = arena.view(-1, size).unbind()

            def run(own: Tensor) -> None:
                given = SharedInputs.over(message, arenas[0], own)
                launch(self.variants[message["variant"]], message, given)

            return {"held": run_concurrently(arenas, run, self.streams)}

    def _device_arena(self, size: int) -> Tensor:
        """A uint8 tensor of `size` bytes on the device, kept for later runs.

        It is freed when a run needs far less, since other processes share the device.
        """
        if not self.room:
            free, total = torch.cuda.mem_get_info()
            self.room = {"room": free, "total": total}
        held = self.device_bytes.numel() if self.device_bytes is not None else 0
        if held < size or held > _MAX_EXCESS * max(size, _MIN_DEVICE_ARENA):
            self.device_bytes = None
            torch.cuda.empty_cache()
            self.device_bytes = torch.empty(
                max(size, _MIN_DEVICE_ARENA), dtype=torch.uint8, device="cuda"
            )
        assert self.device_bytes is not None
        return self.device_bytes[:size]

    @contextlib.contextmanager
    def _on_device(self, message: dict[str, Any]) -> Iterator[Tensor]:
        """The arena on the kernel's device.  After the context it is copied back, and the device is
        idle."""
        host = self.host[: message["size"]]
        if message["device"] == "cpu":
            yield host
            return
        with self._awaited(), self._copied(host) as arena:
            yield arena

    @contextlib.contextmanager
    def _awaited(self) -> Iterator[None]:
        """After the context the device is idle.  There is only one wait: if many processes share a
        GPU, each wait costs a round of time slices."""
        try:
            yield
        finally:
            begun = time.perf_counter()
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                self.poisoned = True
                raise
            finally:
                self.awaited += time.perf_counter() - begun

    @contextlib.contextmanager
    def _in_place(self, host: Tensor) -> Iterator[Tensor]:
        """A copy of these bytes at the arena's begin, where a launch alone has its buffers: a
        kernel that keeps something by its pointers finds them again.  It is copied back."""
        arena = self.host[: host.numel()]
        arena.copy_(host)
        try:
            yield arena
        finally:
            host.copy_(arena)

    @contextlib.contextmanager
    def _copied(self, host: Tensor) -> Iterator[Tensor]:
        """A copy of these bytes on the device; after the context it is copied back, in the stream's
        order.  Also after a refusal, which must not have written anything."""
        arena = self._device_arena(host.numel())
        arena.copy_(host, non_blocking=True)
        try:
            yield arena
        finally:
            try:
                host.copy_(arena, non_blocking=True)
            except RuntimeError:
                self.poisoned = True
                raise


def serve_at(kind: type[KernelProcess]) -> None:
    """Serve on the Unix socket whose path is argv[1]: the main function of a program that runs
    under a tool."""
    faulthandler.enable()
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.connect(sys.argv[1])
    preload()
    kind(peer).serve()


def _unwatched(run: Callable[[], None]) -> int:
    run()
    return 0


def _arch() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    return arch_of(torch.cuda.get_device_capability()).name


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:500]


def _trim(text: str, lines: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])[:4000]
