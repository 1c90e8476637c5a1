"""The child's side of a cell.

The process that the judge starts is a *fork server*.  It imports torch once and forks a *kernel
process* (`kernel_process`) per request, so that a cell that was killed or crashed is back within
milliseconds.  Nothing here knows a Problem, a reference or a test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from typing import Any

from verify.cell import closed_imports
from verify.cell.confinement import Confinement, confine
from verify.cell.descendants import become_subreaper, kill_orphans
from verify.cell.kernel_process import KernelProcess, serve_at
from verify.cell.preloading import preload
from verify.cell.protocol import Closed, receive, send
from verify.machine.leash import die_with

__all__ = ["KernelProcess", "main", "serve_at"]

_EXIT_DEADLINE = 10.0  # seconds for a killed process to end: it has to free a GPU's memory


def main() -> None:
    """Serve as a fork server on the control socket whose descriptor is argv[1]; argv[2:] are for
    `preload`."""
    control = socket.socket(fileno=int(sys.argv[1]))
    preload(sys.argv[2:])
    become_subreaper()
    send(control, {"ready": True})
    scratch_of: dict[int, str] = {}  # process id -> its scratch directory
    folder = ""  # the parent of these directories
    with contextlib.suppress(Closed):
        while True:
            message, fds = receive(control, 2)
            reply: dict[str, Any] = {}
            if message["op"] == "fork":
                folder = message["scratch"]
                pid, scratch = _fork(control, message, *fds)
                scratch_of[pid] = scratch
                reply = {"pid": pid}
            elif message["op"] == "reap":
                reply = {"exit": _reap(message["pid"])}
                scratch = scratch_of.pop(message["pid"], "")
                kill_orphans(scratch_of)
                shutil.rmtree(scratch, ignore_errors=True)
            send(control, reply | {"number": message["number"]})
    for pid in scratch_of:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in scratch_of:
        _reap(pid)
    kill_orphans(())
    for scratch in scratch_of.values():  # a killed judge cannot remove them
        shutil.rmtree(scratch, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir(folder)
    # Nothing else needs cleaning up, and unloading torch takes half as long as importing it.
    os._exit(0)


def _reap(pid: int) -> int | None:
    """The exit status of a process that was killed, or None if it does not end."""
    deadline = time.monotonic() + _EXIT_DEADLINE
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                time.sleep(0.001)
                continue
            return os.waitstatus_to_exitcode(status)
        return None
    return None


def _fork(control: socket.socket, message: dict[str, Any], peer: int, log: int) -> tuple[int, str]:
    scratch = tempfile.mkdtemp(prefix="process-", dir=message["scratch"])
    fork_server = os.getpid()
    pid = os.fork()
    if pid:
        os.close(peer)
        os.close(log)
        return pid, scratch
    # In the kernel process: it must not outlive the fork server, and must never return to the fork
    # server's loop.
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
        send(sock, {"ready": True} | _confine_process(message, scratch))
        KernelProcess(sock).serve()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(70)
    os._exit(0)


def _confine_process(message: dict[str, Any], scratch: str) -> dict[str, Any]:
    """Restrict this process to what a kernel needs; {"error": text} if that fails."""
    os.environ["TMPDIR"] = scratch
    tempfile.tempdir = None
    closed_imports.close()
    rules = message["confinement"]
    if rules is not None:
        try:
            confine(Confinement(tuple(rules["hidden"]), tuple(rules["writable"])), scratch)
        except OSError as error:
            return {"error": str(error)}
    return {}


if __name__ == "__main__":
    main()
