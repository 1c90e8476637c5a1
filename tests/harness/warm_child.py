"""A server with torch imported, which forks the programs that run under a tool.

Each program under a tool imports torch, which takes more than a second of CPU time.  `warm` puts a
small client in the place of the Python that starts such a program; the client lets this server fork
the program, waits for its end and ends with its exit code.  So the program is no descendant of the
tool: a test of hangs, or of what a tool's end leaves behind, starts it by Python.

`python -m tests.harness.warm_child SOCKET` listens on a Unix socket; a request is a JSON list
(command line, environment, directory) and the descriptors of standard output and error; the answer
is the exit code, negative for a signal.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from verify.bundle import ROOT
from verify.machine.leash import die_with

_CLIENT = """
import json, os, socket, sys

peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
peer.connect({server!r})
request = [sys.argv, dict(os.environ), os.getcwd()]
socket.send_fds(peer, [json.dumps(request).encode()], [1, 2])
sys.exit(int(peer.recv(100)))
"""


def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server fork all programs of `ToolCell`s."""
    python = SimpleNamespace(executable=str(_client()))
    monkeypatch.setattr("verify.cell.under_tool.sys", python)


@cache
def _client() -> Path:
    """Start the server of this process, which ends with it; returns the client."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    command = [sys.executable, "-m", __name__, str(folder / "server")]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    server = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE)

    def end() -> None:
        server.kill()
        server.communicate()
        shutil.rmtree(folder)

    atexit.register(end)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    client = folder / "python"
    text = _CLIENT.format(server=str(folder / "server"))
    client.write_text(f"#!{sys.executable} -SE\n{text}", encoding="utf-8")
    client.chmod(0o755)
    return client


def serve(path: str) -> None:
    """Fork a program for each connection until this process is killed."""
    die_with(os.getppid())
    from verify.cell.kernel_process import serve_at
    from verify.profiling import child as profiled
    from verify.sanitizers import child, instrumented_child

    mains: dict[str, Callable[[], None]] = {
        child.__name__: child.main,
        instrumented_child.__name__: instrumented_child.main,
        profiled.__name__: lambda: serve_at(profiled.ProfiledKernelProcess),
    }
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the exit status of children is not needed
    while True:
        peer, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _attend(peer, mains)
            os._exit(0)
        peer.close()


def _attend(peer: socket.socket, mains: dict[str, Callable[[], None]]) -> None:
    """Run one program to its end."""
    request, fds, _, _ = socket.recv_fds(peer, 1 << 20, 2)
    words, environment, folder = json.loads(request)
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        peer.send(str(os.waitstatus_to_exitcode(status)).encode())
        return
    try:
        peer.close()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        assert words[1] == "-m"
        sys.argv = words[2:]
        mains[words[2]]()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
