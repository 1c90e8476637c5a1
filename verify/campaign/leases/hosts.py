"""Hosts: starts a machine's Dask workers, one a GPU or several a CPU, and lets other machines do so
by ssh."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from verify.bundle import for_children
from verify.machine import device, leash
from verify.machine.cores import SHARED_BY, cores

_DEATH = "60"  # seconds after which a worker without a scheduler ends
_GRACE = 10.0  # seconds until a worker that was asked to end is ended


class HostError(Exception):
    """A machine cannot start what is asked of it; the message is one line."""


def is_address(text: str) -> bool:
    """Whether a text is a scheduler's address; otherwise it is the path of a scheduler file, which
    can be there later."""
    return re.fullmatch(r"(?:[a-z]+://)?\[?[\w.:-]+\]?:\d+", text) is not None


def visible_gpus() -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, or all of this machine."""
    return device.visible_gpus() if device.gpus() else []


def placed(count: int | None) -> list[dict[str, str]]:
    """The variables of this machine's workers, one set a worker.

    count: how many; None: one a GPU, or on a machine without a GPU one for two cores.  Raises
    HostError for more workers than GPUs.
    """
    gpus = visible_gpus()
    if gpus:
        if count is not None and count > len(gpus):
            raise HostError(f"{count} workers: one a GPU, and this machine has {len(gpus)}")
        return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:count]]
    count = max(cores() // 2, 1) if count is None else count
    return [{SHARED_BY: str(count)} for _ in range(count)]


def start_workers(
    scheduler: str, count: int | None, folder: Path, *, names: str = "", log: Path | None = None
) -> list[subprocess.Popen[bytes]]:
    """Start this machine's workers; they end with this process.

    scheduler: its address, or the path of its scheduler file.  names: how their names begin, by
    default so that no other machine's do.  log: where their output goes; None: where this
    process's does.  Raises HostError.
    """
    names = names or f"{socket.gethostname()}-{secrets.token_hex(2)}"
    at = [scheduler] if is_address(scheduler) else ["--scheduler-file", scheduler]
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for number, variables in enumerate(placed(count)):
        options = {
            "--name": f"{names}-{number}",
            "--nthreads": "1",
            "--nworkers": "1",
            "--memory-limit": "0",
            "--death-timeout": _DEATH,
            "--local-directory": str(folder),
        }
        command = [sys.executable, "-m", "verify.campaign.leases.dask_worker", *at]
        command += [word for pair in options.items() for word in pair] + ["--no-dashboard"]
        environment = {**os.environ, **variables, leash.PARENT: str(os.getpid())}
        with contextlib.ExitStack() as stack:
            output = None if log is None else stack.enter_context(log.open("ab"))
            found.append(
                subprocess.Popen(
                    command,
                    env=for_children(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            )
    return found


def join(scheduler: str, count: int | None, folder: Path) -> int:
    """Start this machine's workers and wait until they end, which they do with their scheduler.
    Returns how many ended badly.  Raises HostError."""
    with ended(start_workers(scheduler, count, folder)) as workers:
        return sum(worker.wait() != 0 for worker in workers)


def start_by_ssh(
    hosts: Sequence[str], scheduler: str, python: str, log: Path
) -> list[subprocess.Popen[bytes]]:
    """Let each host start its workers: `verify campaign --join` in the directory of this process's
    name there.  Raises HostError if there is no ssh."""
    words = [python, "-m", "verify", "campaign", "--join", scheduler]
    command = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(words)}"
    try:
        with log.open("ab") as output:
            return [
                subprocess.Popen(
                    ["ssh", "-o", "BatchMode=yes", host, command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
                for host in hosts
            ]
    except OSError as error:
        raise HostError(f"ssh: {error.strerror or error}") from None


@contextlib.contextmanager
def ended(processes: list[subprocess.Popen[bytes]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """End these processes at the end."""
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
