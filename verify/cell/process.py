"""The judge's side of a cell: it starts a kernel process, sends requests, and describes its end.

A `ForkServer` is one environment's process (plain, or with Triton's interpreter).  A `Cell` has at
most one kernel process, forked from it.  An exception, a crash, a hang or a broken CUDA context in
that process becomes a `Reply`; the next request gets a fresh process.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verify.cell import extension_locks
from verify.cell.arena import Arena, Holder
from verify.cell.descendants import compiling, resident
from verify.cell.fork_server import (
    COMPILER,
    PLAIN_CPU,
    PLAIN_CUDA,
    ROOT,
    TRITON_COMPILER,
    Environment,
    ForkServer,
    InfrastructureError,
)
from verify.cell.limits import (
    Output,
    TooMuchMemory,
    Watch,
    build_deadline,
    held,
    memory_limit,
)
from verify.cell.protocol import Closed, Countdown, receive, send
from verify.cell.untrusted_text import visible, visible_data

__all__ = [
    "COMPILER",
    "PLAIN_CPU",
    "PLAIN_CUDA",
    "ROOT",
    "TRITON_COMPILER",
    "Cell",
    "Environment",
    "ForkServer",
    "InfrastructureError",
    "Reply",
    "memory_limit",
]

_LARGEST_DEVICE = 1 << 50  # bytes; no device has more
_BUDGET = 8  # a message of several launches begins none after this part of the deadline of one
_LAST_WORDS = 1500  # characters of a dead process's output
_READ = 32 << 10  # bytes of it in which its reason is looked for
# C++'s runtime writes these lines when an exception ends the process.  faulthandler's stacks, one
# for each thread, follow.
_UNCAUGHT = re.compile(r"^(?:terminate called|\s+what\(\):).*$", re.MULTILINE)
# faulthandler's list of loaded modules, which says nothing of the kernel
_MODULES = re.compile(r"\nExtension modules: [^\n]*")
_MOST_OUTPUT = 1 << 20  # bytes of its output that stay on the disk


# Statuses that the other processes of the machine can cause: memory ran out, or the device lets no
# further process use it.
CROWDED = ("out of memory", "device busy")


@dataclass(frozen=True)
class Reply:
    """The outcome of a request.

    status: "ok", "unsupported", "breach", "raised", "out of memory", "device busy" (the device lets
    no further process use it), "crash" or "hang"; of a process with delays also `ways.UNBUILT`.
    seconds: duration.  grown: bytes by which the process's unshared memory grew.  kept, taken:
    bytes on a device, see `DeviceMemory.watch`.  All texts have passed `untrusted_text.visible`.
    """

    status: str
    message: str = ""
    argument: str = ""
    seconds: float = 0.0
    grown: int = 0
    kept: int = 0
    taken: int = 0
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def crowded(self) -> bool:
        """Whether others can have caused it; see `CROWDED`."""
        return self.status in CROWDED


def _bytes(value: object) -> int:
    """A number of bytes that a kernel process sent; 0 for anything that is not one."""
    return value if type(value) is int and 0 <= value < _LARGEST_DEVICE else 0


class Cell:
    """One kernel process at a time, which loads kernel files and runs them in the judge's arena.

    process_number: kernel processes started so far.  most_output: see `Output`.
    """

    most_output = _MOST_OUTPUT

    def __init__(self, fork_server: ForkServer) -> None:
        self.environment = fork_server.environment
        self.process_number = 0
        self._fork_server = fork_server
        self._socket: socket.socket | None = None
        self._pid = 0
        self._output = Output(self.most_output)
        self._loaded: set[str] = set()
        self._holder = Holder()  # of the arenas that the present process maps
        self._arena_generation = 0
        self._hangs: Counter[str] = Counter()  # consecutive hangs, by variant
        self._requests = 0

    # Requests.

    def load(self, path: str) -> Reply:
        """Load a kernel file; the reply's data["variants"] describes its variants."""
        self._ensure_process()
        extension_locks.clear()  # a stale lock of an earlier run would block this request
        message = {"op": "load", "path": path, "package_root": str(ROOT)}
        reply = self._ask(message, build_deadline(), building=0.0)
        if reply.status == "hang":
            reply = replace(
                reply,
                message=(
                    f"loading it: {reply.message} (VERIFY_BUILD_DEADLINE sets how long it may take)"
                ),
            )
        if reply.ok and self._socket is None:  # a fresh process would take as much
            reply = replace(reply, status="out of memory", message=f"loading it: {reply.message}")
        if reply.ok:
            self._loaded.add(path)
        return reply

    def arch(self) -> str:
        """The architecture that this cell's kernels run on, such as "sm_90" or "cpu"."""
        self._ensure_process()
        reply = self._ask({"op": "device"}, self.environment.patience)
        if not reply.ok:
            raise InfrastructureError(
                f"the {self.environment.name} cell does not answer: {reply.message}"
            )
        return str(reply.data["arch"])

    def workspace(self, path: str, request: dict[str, Any]) -> Reply:
        """Ask for the scratch buffers that the variant needs for these shapes."""
        return self._on_loaded(path, request | {"op": "workspace"}, self.environment.patience)

    def builds(self, path: str, variant: str, arch: str) -> Reply:
        """The names of the variant's builds for that architecture: data["builds"]."""
        return self._on_loaded(
            path, {"op": "builds", "variant": variant, "arch": arch}, self.environment.patience
        )

    def compile(
        self, path: str, variant: str, arch: str, build: str, *, disassemble: bool = True
    ) -> Reply:
        """Compile one build, without a GPU: data["built"], see `verify.cell.building`."""
        message: dict[str, Any] = {"op": "compile", "variant": variant, "arch": arch}
        message |= {"build": build, "disassemble": disassemble}
        return self._on_loaded(path, message, self.environment.patience)

    def run(self, path: str, request: dict[str, Any], arena: Arena) -> Reply:
        """Run one kernel on the arena's buffers; returns when the device is idle again."""
        patience = float(os.environ.get("VERIFY_DEADLINE", self.environment.patience))
        # Every step of shrinking a hang costs a deadline: after two hangs the deadline is shorter.
        variant = str(request["variant"])
        sure = self._hangs[variant] > 1
        deadline = patience / 4 if sure else patience
        reply = self._on_loaded(
            path, request | {"op": "run", "device": self.environment.device}, deadline, arena
        )
        if not sure:
            self._hangs[variant] = self._hangs[variant] + 1 if reply.status == "hang" else 0
        return reply

    def runs_several(self, variant: str) -> bool:
        """Whether `run_several` can be asked: not if the variant has hung twice in a row."""
        return self._hangs[variant] <= 1

    def run_several(
        self, path: str, requests: Sequence[dict[str, Any]], arena: Arena
    ) -> tuple[Reply, list[Reply]]:
        """Run several launches with one message, one after another.  A request's "begin": the byte
        of the arena at which its buffers begin.

        Returns the reply to the message and, if that is "ok", one for each launch that was begun in
        time: at least the first.  Each has the time that it would have alone.  The memory that all
        of them took counts as the first one's.
        """
        patience = float(os.environ.get("VERIFY_DEADLINE", self.environment.patience))
        budget = patience / _BUDGET
        message = {"op": "several", "device": self.environment.device, "budget": budget}
        reply = self._on_loaded(
            path, message | {"launches": list(requests)}, patience + budget, arena
        )
        if not reply.ok:
            return reply, []
        variant = str(requests[0]["variant"])
        self._hangs[variant] = 0
        kept = reply.data.get("kept_by")
        if not isinstance(kept, list) or not 0 < len(kept) <= len(requests):
            return replace(reply, status="breach", message="a reply to other launches"), []
        more = [Reply("ok", kept=_bytes(each)) for each in kept[1:]]
        return reply, [replace(reply, kept=_bytes(kept[0])), *more]

    def time(self, path: str, request: dict[str, Any]) -> Reply:
        """Time calls of one entry point on inputs that the process draws (`verify.cell.stopwatch`,
        which says what the reply's data holds)."""
        patience = float(os.environ.get("VERIFY_DEADLINE", self.environment.patience))
        message = request | {"op": "time", "device": self.environment.device}
        return self._on_loaded(path, message, patience)

    def close(self) -> None:
        """End the kernel process, and close the cell."""
        self._end_process()
        self._output.file.close()

    def restart(self) -> None:
        """End the kernel process; the next request gets a fresh one."""
        self._end_process()

    # The kernel process: its start, its requests, its end.

    def _on_loaded(
        self, path: str, message: dict[str, Any], deadline: float, arena: Arena | None = None
    ) -> Reply:
        self._ensure_process()
        if path not in self._loaded:
            reply = self.load(path)
            if not reply.ok:
                return reply
        if arena is not None:
            arena.give(self._holder)
        if arena is not None and self._arena_generation != arena.generation:
            reply = self._ask(
                {"op": "arena", "capacity": arena.capacity}, self.environment.patience, [arena.fd]
            )
            if not reply.ok:
                return reply
            self._arena_generation = arena.generation
        return self._ask(message, deadline)

    def _ask(
        self,
        message: dict[str, Any],
        deadline: float,
        fds: list[int] | None = None,
        building: float | None = None,
    ) -> Reply:
        """building: seconds for which a compiler may stop the clock, instead of
        `build_deadline`."""
        assert self._socket is not None
        most = build_deadline() if building is None else building
        watch = Watch(self._pid, most, self._compiles, self._output)
        begun = time.perf_counter()
        before = resident(self._pid)
        self._socket.settimeout(deadline)
        self._requests += 1
        try:
            send(self._socket, message | {"request": self._requests}, fds)
            data, _ = receive(self._socket, countdown=Countdown(deadline, watch.counts))
            if data.get("request") != self._requests:
                raise Closed("a reply to no request")
        except TimeoutError:
            self._end_hanging()
            return Reply(
                "hang",
                f"no answer within {deadline:g} s; killed",
                seconds=time.perf_counter() - begun,
            )
        except TooMuchMemory:
            text = f"its process took {self._taken()}; killed"
            self._end_process()
            return Reply("out of memory", text, seconds=time.perf_counter() - begun)
        except Closed as end:
            return Reply(
                "crash", self._exit_description(str(end)), seconds=time.perf_counter() - begun
            )
        seconds = time.perf_counter() - begun
        self._output.shorten()
        # Text of a kernel enters the judge only here.  Paths of sources are opened, never shown.
        paths = {name: data[name] for name in ("sources", "needed") if name in data}
        data = visible_data(data) | paths
        reason = str(data.get("reason") or data.get("message") or "")
        reply = Reply(
            status=str(data.get("status", "raised")),
            message=reason,
            argument=str(data.get("argument", "")),
            seconds=seconds,
            grown=max(resident(self._pid) - before, 0),
            kept=_bytes(data.get("kept")),
            taken=_bytes(data.get("taken")),
            data=data,
        )
        if held(self._pid) > memory_limit():
            reply = replace(
                reply,
                message=f"{reason}\nits process took {self._taken()}; a fresh one follows".strip(),
            )
            self._end_process()
        elif data.get("poisoned"):
            self._end_process()
        return reply

    def _taken(self) -> str:
        taken, limit = held(self._pid) / (1 << 30), memory_limit() / (1 << 30)
        return (
            f"{taken:.1f} GiB of memory, more than the {limit:.1f} GiB that it may have"
            " (VERIFY_LIFE_MEMORY, in GiB)"
        )

    def _ensure_process(self) -> None:
        # Data between two requests means that the process has ended (with its fork server, for
        # example), or sent something unasked.  Neither is an answer to the next request.
        if self._socket is not None and select.select([self._socket], [], [], 0)[0]:
            self._end_process()
        if self._socket is not None:
            return
        self._output.begin()
        self._socket, self._pid = self._fork_server.fork(self._output.file.fileno())
        self._loaded.clear()
        self._holder = Holder()
        self._arena_generation = 0
        self.process_number += 1

    def _end_process(self) -> int | None:
        """Kill the kernel process, if there is one, and return its exit status."""
        if self._socket is None:
            return None
        self._holder.ended = True
        held = extension_locks.held_by(self._pid)
        self._socket.close()
        self._socket = None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        status = self._fork_server.reap(self._pid)
        extension_locks.clear(held)
        return status

    def _end_hanging(self) -> None:
        """End a kernel process that has passed its deadline."""
        self._end_process()

    def _compiles(self) -> bool:
        """Whether a compiler runs for the kernel process."""
        return compiling(self._pid)

    def _exit_description(self, garbage: str) -> str:
        """How the kernel process ended, and the end of its output.

        garbage: why its reply was unreadable; "" if it sent none.
        """
        # A process that is ending keeps its exit status; one that only closed its socket is killed.
        status = self._end_process()
        if garbage:
            how = f"sent {garbage}; killed"
        elif status is None:
            how = "the cell ended"
        elif status < 0:
            name = signal.Signals(-status).name
            how = f"killed by {name}" + (
                " (out of memory, or it closed its socket?)" if name == "SIGKILL" else ""
            )
        else:
            how = f"exited with status {status}"
        with contextlib.suppress(OSError):
            written = _MODULES.sub("", self._output.end(_READ))
            last = written[-_LAST_WORDS:]
            reasons = _UNCAUGHT.findall(written[: len(written) - len(last)])
            said = (line[:_LAST_WORDS] for line in (*reasons[-2:], last))
            return "\n".join(filter(None, (how, *(visible(text).strip() for text in said))))
        return how
