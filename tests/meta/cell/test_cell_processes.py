"""The processes of cells: none outlives its cell, and a fork server that dies is replaced."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.harness.kernel_files import ENVIRONMENT, FILL, Writer, process_of, run, works
from verify.cell.arena import Arena
from verify.cell.process import Cell, Environment, ForkServer, InfrastructureError

torch.set_num_threads(1)


def children(pid: int | str = "self") -> set[int]:
    """Process ids of the direct children."""
    pids = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            pids |= set(map(int, (task / "children").read_text().split()))
    return pids


def ends(pid: int, within: float = 5.0) -> bool:
    """Whether that process is gone, or a zombie, soon."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_descendants_die_with_a_kernel_process(
    cell: Cell, arena: Arena, write: Writer, tmp_path: Path
) -> None:
    mark = tmp_path / "pid"
    spawn = (
        f"child = subprocess.Popen(['sleep', '60'])\nopen({str(mark)!r},"
        " 'w').write(str(child.pid))\n"
    )
    for ending in ("os._exit(1)", "ctypes.string_at(0)", "say(framed('garbage'))"):
        assert run(cell, write(spawn + ending), arena).status == "crash"
        assert ends(int(mark.read_text())), f"a child outlived {ending}"


def test_a_closed_cell_leaves_no_process(
    fork_server: ForkServer, arena: Arena, write: Writer
) -> None:
    cell = Cell(fork_server)
    assert works(cell, write(FILL), arena)
    forked = children(process_of(fork_server))
    assert forked
    cell.close()
    assert not children(process_of(fork_server)) & forked


def test_fifty_lives_leak_nothing(
    fork_server: ForkServer,
    arena: Arena,
    write: Writer,
    record_property: Callable[[str, object], None],
) -> None:
    """No descriptor, here or in the fork server, and no process is left; a restart is cheap."""
    cell = Cell(fork_server)
    good, bad = write(FILL), write("os._exit(1)")
    assert works(cell, good, arena)
    pid = process_of(fork_server)

    def state() -> tuple[int, int, int, int]:
        return (
            len(os.listdir("/proc/self/fd")),
            len(os.listdir(f"/proc/{pid}/fd")),
            len(children()),
            len(children(pid)),
        )

    before, times = state(), []
    for _ in range(50):
        assert run(cell, bad, arena).status == "crash"
        begun = time.perf_counter()
        assert cell.arch() == "cpu"
        times.append(time.perf_counter() - begun)
    assert works(cell, good, arena)
    assert state() == before
    assert cell.process_number == 51
    cell.close()
    respawn = sorted(times)[25]
    record_property("median respawn, milliseconds", round(1e3 * respawn, 1))
    print(f"respawn: median {1e3 * respawn:.1f} ms, worst {1e3 * max(times):.1f} ms")
    assert respawn < 0.5, "a fork of a warm process, not a start of a new one"


def test_a_killed_fork_server_is_replaced(
    arena: Arena, write: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFY_CONFINE", "0")  # a confined process cannot kill it
    fork_server = ForkServer(ENVIRONMENT)
    cell, bystander = Cell(fork_server), Cell(fork_server)
    other = Arena()
    try:
        good = write(FILL)
        assert works(cell, good, arena)
        assert works(bystander, good, other)
        forked = children(process_of(fork_server))
        assert len(forked) == 2
        reply = run(cell, write("os.kill(os.getppid(), signal.SIGKILL); time.sleep(30)"), arena)
        assert reply.status == "crash"
        assert all(ends(pid) for pid in forked), (
            "kernel processes must not outlive their fork server"
        )
        with contextlib.suppress(InfrastructureError):
            works(cell, good, arena)
        assert works(cell, good, arena)
        assert works(bystander, good, other), (
            "what one kernel did to the fork server is no crash of another's"
        )
    finally:
        for one in (cell, bystander, other, fork_server):
            one.close()


def test_a_fork_server_that_cannot_start_says_why() -> None:
    fork_server = ForkServer(Environment("broken", "cpu", (("PYTHONHOME", "/nowhere"),)))
    cell = Cell(fork_server)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        InfrastructureError,
        match=r"broken fork server did not start: [\s\S]*(encodings|PYTHONHOME|prefix)",
    ):
        cell.arch()
    fork_server.close()
    cell.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_closing_twice_is_no_error(write: Writer) -> None:
    fork_server = ForkServer(ENVIRONMENT)
    fork_server.close()
    fork_server.close()
