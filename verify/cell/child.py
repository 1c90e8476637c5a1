"""The child's side of a cell.

The process that the judge starts is a *fork server*: it imports torch once and forks a *life* per
request, so that a cell that was killed or crashed is back within milliseconds.  A life loads kernel
files, maps the judge's arena and runs kernels in it, until its socket closes.  Nothing here knows a
Problem, a reference or a test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import mmap
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verify.cell import closed_imports as isolation
from verify.cell.concurrent import Streams, run_together
from verify.cell.confinement import Confinement, confine
from verify.cell.descendants import become_subreaper, bury
from verify.cell.device_memory import DeviceMemory
from verify.cell.launching import _arguments, _buffers, launch, turn
from verify.cell.loading import Breach, line_of, load
from verify.cell.protocol import Closed, receive, send
from verify.machine.leash import die_with
from verify.variant import Build, Unsupported, Variant, arch_of

# requests in which an exception is the judge's, but for a kernel's entry point
_OURS = ("run", "arena", "device")
_LEAST_ARENA = 16 << 20  # bytes on a device, below which nothing is gained by giving them back
_SPARE = 4
_DEATH = 10.0  # seconds that a killed life may take to end: a GPU's memory has to be given back


def main() -> None:
    """Serve as a fork server on the control socket whose descriptor is argv[1]."""
    control = socket.socket(fileno=int(sys.argv[1]))
    preload()
    become_subreaper()
    send(control, {"ready": True})
    lives: dict[int, str] = {}  # process ids, and the directory that each may fill
    folder = ""  # which holds those directories
    with contextlib.suppress(Closed):
        while True:
            message, fds = receive(control, 2)
            reply: dict[str, Any] = {}
            if message["op"] == "fork":
                folder = message["scratch"]
                pid, scratch = _fork(control, message, *fds)
                lives[pid] = scratch
                reply = {"pid": pid}
            elif message["op"] == "reap":
                reply = {"exit": _reap(message["pid"])}
                scratch = lives.pop(message["pid"], "")
                bury(lives)
                shutil.rmtree(scratch, ignore_errors=True)
            send(control, reply | {"number": message["number"]})
    for pid in lives:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in lives:
        _reap(pid)
    bury(())
    for scratch in lives.values():  # a judge that was killed removes nothing
        shutil.rmtree(scratch, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir(folder)
    # nothing is left to tidy up, and to take torch down is half as much work as to import it
    os._exit(0)


def _reap(pid: int) -> int | None:
    """The exit status of a life that was killed, or None if it does not end."""
    deadline = time.monotonic() + _DEATH
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                time.sleep(0.001)
                continue
            return os.waitstatus_to_exitcode(status)
        return None
    return None


def preload() -> None:
    """What every life needs and must not wait for: one thread for torch and, where Triton
    interprets, a mended interpreter."""
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from verify.cell.triton_interpreter import repair

        with contextlib.suppress(ImportError):
            repair()
    # No collection of garbage in a life need look at all that was imported: it stays.
    gc.collect()
    gc.freeze()


def _fork(control: socket.socket, message: dict[str, Any], peer: int, log: int) -> tuple[int, str]:
    scratch = tempfile.mkdtemp(prefix="life-", dir=message["scratch"])
    fork_server = os.getpid()
    pid = os.fork()
    if pid:
        os.close(peer)
        os.close(log)
        return pid, scratch
    # The life: it must not outlive the fork server, and must not return into the fork server's loop
    # whatever happens.
    try:
        die_with(fork_server)
        os.setsid()
        become_subreaper()
        control.close()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        faulthandler.enable()
        sock = socket.socket(fileno=peer)
        send(sock, {"ready": True} | _shut_in(message, scratch))
        Life(sock).serve()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(70)
    os._exit(0)


def _shut_in(message: dict[str, Any], scratch: str) -> dict[str, Any]:
    """Take from this process what a kernel has no business with; {"error"} where that fails."""
    os.environ["TMPDIR"] = scratch
    tempfile.tempdir = None
    isolation.close()
    held = message["confinement"]
    if held is not None:
        try:
            confine(Confinement(tuple(held["hidden"]), tuple(held["writable"])), scratch)
        except OSError as error:
            return {"error": str(error)}
    return {}


class Life:
    """One life: its socket, the variants that it loaded and the arena that it mapped."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.variants: dict[str, Variant] = {}
        self.host = torch.empty(0, dtype=torch.uint8)
        self.device_bytes: Tensor | None = None
        self.pinned = False
        self.streams: Streams | None = None
        self.memory = DeviceMemory()
        self.poisoned = False

    def serve(self) -> None:
        """Answer requests until the judge hangs up."""
        with contextlib.suppress(Closed):
            while True:
                message, fds = receive(self.sock, 1)
                turn.kernels = message["op"] not in _OURS
                try:
                    reply = self._answer(message, fds)
                except Unsupported as refusal:
                    reply = {
                        "status": "unsupported",
                        "argument": refusal.argument,
                        "reason": refusal.reason,
                    }
                except Breach as breach:
                    reply = {"status": "breach", "message": str(breach)}
                except torch.OutOfMemoryError as error:
                    torch.cuda.empty_cache()
                    reply = {"status": "out of memory", "message": _first_line(error)}
                except MemoryError as error:
                    reply = {
                        "status": "out of memory",
                        "message": _first_line(error) or "MemoryError",
                    }
                except (Exception, SystemExit, KeyboardInterrupt) as error:
                    reply = {
                        "status": "raised",
                        "message": f"{type(error).__name__}: {_first_line(error)}",
                        "where": line_of(error, str(message.get("path"))),
                        "traceback": _trim(traceback.format_exc()),
                        # A device's error shows behind the launch.
                        "judge": not (turn.kernels or self.poisoned),
                    }
                send(
                    self.sock,
                    reply | {"poisoned": self.poisoned, "request": message.get("request")},
                )

    def _answer(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        match message["op"]:
            case "load":
                loaded = load(Path(message["path"]), message["package_root"])
                self.variants.update(
                    {variant.name: variant for variant in (*loaded.variants, *loaded.unheard)}
                )
                extra = {"undeclared": loaded.undeclared, "interpreted": loaded.interpreted}
                described = [variant.describe() | extra for variant in loaded.variants]
                return {"status": "ok", "variants": described, "sources": list(loaded.sources)}
            case "device":
                return {"status": "ok", "arch": _arch()}
            case "arena":
                self._map(fds[0], message["capacity"])
                return {"status": "ok"}
            case "workspace":
                variant = self.variants[message["variant"]]
                buffers = _buffers(message, torch.empty(0, dtype=torch.uint8, device="meta"))
                workspace_of = variant.entry(message["entry"])[1]
                wanted = (
                    workspace_of(_arguments(message, variant, buffers))
                    if workspace_of is not None
                    else {}
                )
                for name in wanted:
                    if not str(name).isprintable():
                        raise Breach(f"workspace: {name!r} is no name: use letters, digits and _")
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
                begun = time.perf_counter()
                resources = asdict(build.compile())
                return {
                    "status": "ok",
                    "resources": resources,
                    "seconds": time.perf_counter() - begun,
                }
            case "run" if message.get("together"):
                return {"status": "ok"} | self._run_together(message)
            case "run":
                return {"status": "ok"} | self._run(message)
        raise ValueError(f"unknown request {message['op']!r}")

    def _builds(self, message: dict[str, Any]) -> Sequence[Build]:
        variant = self.variants[message["variant"]]
        return variant.builds(message["arch"]) if variant.builds is not None else ()

    def _map(self, fd: int, capacity: int) -> None:
        if self.pinned:
            # Before its memory goes: the next mapping may lie at the same address, which CUDA would
            # take for pinned already.
            torch.cuda.cudart().cudaHostUnregister(self.host.data_ptr())  # type: ignore[no-untyped-call]
        memory = mmap.mmap(fd, capacity)
        os.close(fd)
        self.host = torch.frombuffer(memory, dtype=torch.uint8)
        self.device_bytes = None
        self.pinned = torch.cuda.is_available() and self._pin(capacity)

    def _pin(self, capacity: int) -> bool:
        """Pinned, the whole arena moves in one fast copy each way; unpinned it would still be
        right."""
        status = torch.cuda.cudart().cudaHostRegister(self.host.data_ptr(), capacity, 0)  # type: ignore[no-untyped-call]
        if int(status):
            print(f"the arena could not be pinned: {status}", flush=True)
            # CUDA remembers the error for whoever asks next, which must not be the kernel on trial.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")
        return not int(status)

    def _run(self, message: dict[str, Any]) -> dict[str, Any]:
        with self._on_device(message) as arena:
            run = partial(launch, self.variants[message["variant"]], message, arena)
            return run() or {} if message["device"] == "cpu" else self.memory.watch(run)

    def _run_together(self, message: dict[str, Any]) -> dict[str, Any]:
        self.streams = self.streams or Streams()
        size = message["size"]
        with self._on_device(message | {"size": size * message["together"]}) as arena:
            run = partial(launch, self.variants[message["variant"]], message)
            return {"held": run_together(arena.view(-1, size).unbind(), run, self.streams)}

    def _device_arena(self, size: int) -> Tensor:
        """Bytes on the device for a run, kept for the next ones; given back where far less is
        needed, since other processes share the device."""
        held = self.device_bytes.numel() if self.device_bytes is not None else 0
        if held < size or held > _SPARE * max(size, _LEAST_ARENA):
            self.device_bytes = None
            torch.cuda.empty_cache()
            self.device_bytes = torch.empty(
                max(size, _LEAST_ARENA), dtype=torch.uint8, device="cuda"
            )
        assert self.device_bytes is not None
        return self.device_bytes[:size]

    @contextlib.contextmanager
    def _on_device(self, message: dict[str, Any]) -> Iterator[Tensor]:
        """The arena where the kernel runs; it is back, and the device idle, behind it."""
        size = message["size"]
        if message["device"] == "cpu":
            yield self.host[:size]
            return
        arena = self._device_arena(size)
        arena.copy_(self.host[:size], non_blocking=True)
        try:
            yield arena
        finally:
            try:
                # After a refusal too: it must have touched nothing.  One wait for all three: where
                # many processes share a GPU, each wait costs a round of its time slices.
                self.host[:size].copy_(arena, non_blocking=True)
                torch.cuda.synchronize()
            except RuntimeError:
                self.poisoned = True
                raise


def _arch() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    return arch_of(torch.cuda.get_device_capability()).name


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:500]


def _trim(text: str, lines: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])[:4000]


if __name__ == "__main__":
    main()
