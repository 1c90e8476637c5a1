"""Cells: a kernel's effect on its process becomes a reply, and the next request gets a fresh
process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.harness.kernel_files import ENVIRONMENT, FILL, WHERE, Writer, process_of, run
from verify.cell.arena import Arena
from verify.cell.process import Cell, Environment, ForkServer, InfrastructureError

torch.set_num_threads(1)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena()
    yield arena
    arena.close()


def works(cell: Cell, path: Path, arena: Arena) -> bool:
    reply = run(cell, path, arena)
    right = (
        reply.ok
        and bool((arena.read(WHERE, "out") == 1).all())
        and bool((arena.read(WHERE, "lse") == 2).all())
    )
    return right and arena.damage(WHERE, "nan") is None


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


# What a kernel may do to its process: (its text, the reply's status, a word of its message).

FATES = {
    "exception": (
        "raise ValueError('no such tile\\nsecond line')",
        "raised",
        "ValueError: no such tile",
    ),
    "SystemExit": ("sys.exit(3)", "raised", "SystemExit: 3"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", "raised", "KeyboardInterrupt"),
    "an exception that cannot be shown": (
        "class Bad(Exception):\n    def __str__(self): raise RuntimeError('no')\nraise Bad",
        "crash",
        "exited with status 70",
    ),
    "RecursionError": ("forward(args, out, lse, workspace)", "raised", "RecursionError"),
    "MemoryError": ("raise MemoryError", "out of memory", "MemoryError"),
    "a CUDA call without memory": (
        "raise RuntimeError('CUDA error: out of memory\\nSearch for')",
        "out of memory",
        "CUDA error: out of memory",
    ),
    "a driver call without memory": (
        "raise RuntimeError('CUDA_ERROR_OUT_OF_MEMORY')",
        "out of memory",
        "CUDA_ERROR_OUT_OF_MEMORY",
    ),
    "too large an allocation": ("bytearray(1 << 60)", "out of memory", "MemoryError"),
    "refusal": ("raise Unsupported('softcap', 'is not for me')", "unsupported", "is not for me"),
    "os._exit": (
        "print('last words', flush=True); os._exit(5)",
        "crash",
        "exited with status 5\nlast words",
    ),
    "silent exit": ("os._exit(0)", "crash", "exited with status 0"),
    "segfault": (
        "print('last words', file=sys.stderr, flush=True); ctypes.string_at(0)",
        "crash",
        "killed by SIGSEGV",
    ),
    "abort": ("os.abort()", "crash", "killed by SIGABRT"),
    "SIGKILL": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        "crash",
        "killed by SIGKILL (out of memory",
    ),
    "every descriptor closed": ("os.closerange(0, 256)", "crash", ""),
    "own socket closed": (
        "[os.close(fd) for fd in sockets()]; time.sleep(60)",
        "crash",
        "killed by SIGKILL",
    ),
    "own socket closed, then an exit": (
        "[os.close(fd) for fd in sockets()]; os._exit(9)",
        "crash",
        "",
    ),
    "no JSON": ("say(framed('no json at all'))", "crash", "not JSON"),
    "no object": ("say(framed('[1, 2]'))", "crash", "not an object"),
    "no text": ("say(struct.pack('<I', 4) + bytes([0xff, 0xfe, 0xfd, 0x80]))", "crash", "not JSON"),
    "JSON too deep": ("say(framed('[' * 200000))", "crash", "not JSON"),
    "a number too long": ("say(framed('{\"status\": ' + '9' * 5000 + '}'))", "crash", "not JSON"),
    "a message of 4 GiB": (
        "say(struct.pack('<I', 0xffffffff)); time.sleep(60)",
        "crash",
        "a message of 4294967295 bytes",
    ),
    "a truncated message": (
        "say(struct.pack('<I', 1000) + b'{'); os._exit(1)",
        "crash",
        "exited with status 1",
    ),
    "a truncated header": ("say(b'ab'); os._exit(1)", "crash", "exited with status 1"),
    "an unknown status": (
        'say(framed(\'{"status": "pickle", "message": [1]}\'))',
        "crash",
        "a reply to no request",
    ),
    "no status": ("say(framed('{}'))", "crash", "a reply to no request"),
    "a stranger's answer": (
        'say(framed(\'{"status": "ok", "request": 0}\'))',
        "crash",
        "a reply to no request",
    ),
}


@pytest.mark.parametrize("fate", FATES)
def test_a_fate_is_a_reply_and_a_fresh_process_follows(
    fate: str, cell: Cell, arena: Arena, write: Writer
) -> None:
    body, status, words = FATES[fate]
    good, bad = write(FILL), write(body)
    begun = time.monotonic()
    reply = run(cell, bad, arena)
    assert reply.status == status, reply
    assert words in reply.message
    assert reply.seconds >= 0
    assert works(cell, good, arena), "the next request must find a working process"
    assert time.monotonic() - begun < cell.environment.patience, (
        "no fate but a hang may cost a deadline"
    )


def test_last_words_and_the_traceback_reach_the_judge(
    cell: Cell, arena: Arena, write: Writer
) -> None:
    reply = run(cell, write(FATES["segfault"][0]), arena)
    assert "last words" in reply.message
    assert "Segmentation fault" in reply.message, "faulthandler's"
    assert "forward" in reply.message
    reply = run(cell, write("raise ValueError('here')"), arena)
    assert reply.data["traceback"].endswith("ValueError: here")
    assert "kernel" in reply.data["traceback"]


def test_a_refusal_names_its_argument(cell: Cell, arena: Arena, write: Writer) -> None:
    assert run(cell, write(FATES["refusal"][0]), arena).argument == "softcap"


def test_a_hang_ends_at_the_deadline_and_one_that_was_repeated_sooner(
    cell: Cell, arena: Arena, write: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFY_DEADLINE", "1")
    good = write(FILL)
    stubborn = write("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()")
    reply = run(cell, stubborn, arena)
    assert reply.status == "hang"
    assert "no answer within 1 s" in reply.message
    assert 0.9 < reply.seconds < 5
    assert works(cell, good, arena)
    assert "within 1 s" in run(cell, stubborn, arena).message
    assert "within 1 s" in run(cell, stubborn, arena).message, "what worked in between"
    again = run(cell, stubborn, arena)
    assert again.status == "hang"
    assert "within 0.25 s" in again.message
    assert works(cell, good, arena)


def test_what_a_kernel_prints_harms_nothing(cell: Cell, arena: Arena, write: Writer) -> None:
    shout = (
        'print(\'{"status": "raised"}\' * 1000); os.write(1, bytes(range(256)) * 100); os.write(2,'
        " bytes([255]) * 70000)"
    )
    noisy = write(f"{FILL}\n{shout}")
    for _ in range(3):
        assert works(cell, noisy, arena)
    assert cell.process_number == 1


def test_a_reply_may_be_huge(cell: Cell, arena: Arena, write: Writer) -> None:
    reply = run(cell, write("raise ValueError('x' * (100 << 20))"), arena)
    assert (reply.status, len(reply.message) < 1000) == ("raised", True)
    reply = run(cell, write("raise Unsupported('q' * (80 << 20), 'too much')"), arena)
    assert reply.status == "crash"
    assert works(cell, write(FILL), arena)


def test_many_kernels_share_a_process(cell: Cell, arena: Arena, write: Writer) -> None:
    files = [write(FILL) for _ in range(3)]
    assert all(works(cell, path, arena) for path in files * 2)
    assert cell.process_number == 1


def test_the_arena_may_grow_between_runs(cell: Cell, arena: Arena, write: Writer) -> None:
    good = write(FILL)
    assert works(cell, good, arena)
    arena.reserve(arena.capacity + 1)
    assert works(cell, good, arena)
    assert cell.process_number == 1


def test_garbage_in_every_descriptor_harms_nobody(cell: Cell, arena: Arena, write: Writer) -> None:
    """A kernel's open descriptors are its log, its socket and the arena: it writes garbage to each,
    and the judge survives."""
    bad = write("""
        for fd in range(256):
            try:
                os.write(fd, b"garbage " * 8)
                os.lseek(fd, 0, os.SEEK_SET)
                os.write(fd, b"garbage " * 8)
            except OSError:
                pass
        """)
    reply = run(cell, bad, arena)
    assert reply.status == "crash"
    damage = arena.damage(WHERE, "nan")
    assert damage is None or damage.slot == "redzone"
    assert works(cell, write(FILL), arena)


def test_a_file_that_dies_on_import(
    cell: Cell, arena: Arena, tmp_path: Path, write: Writer
) -> None:
    path = tmp_path / "dies.py"
    for text, status in (
        ("raise SystemExit(1)", "raised"),
        ("import os; os._exit(3)", "crash"),
        ("def", "raised"),
        ("", "breach"),
    ):
        path.write_text(text, encoding="utf-8")
        assert cell.load(str(path)).status == status
    assert cell.load(str(tmp_path / "missing.py")).status == "breach"
    path.write_text("from verify.variant import *\nVARIANTS = [3]", encoding="utf-8")
    assert cell.load(str(path)).status == "breach"
    assert works(cell, write(FILL), arena)


def test_a_load_describes_and_does_not_run(cell: Cell, write: Writer) -> None:
    reply = cell.load(str(write("os._exit(1)")))
    assert reply.ok
    assert [data["name"] for data in reply.data["variants"]] == ["kernel"]
    assert reply.data["variants"][0]["undeclared"] is False
    assert cell.arch() == "cpu"


# Processes.


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
    try:
        good = write(FILL)
        assert works(cell, good, arena)
        assert works(bystander, good, arena)
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
        assert works(bystander, good, arena), (
            "what one kernel did to the fork server is no crash of another's"
        )
    finally:
        for one in (cell, bystander):
            one.close()
        fork_server.close()


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


# Forged replies.


def test_a_reply_forged_ahead_of_time_answers_no_later_request(
    cell: Cell, arena: Arena, write: Writer
) -> None:
    """A second message left in the socket must not count as the answer to the next request."""
    good = write(FILL)
    forger = write(
        'say(framed(\'{"status": "ok"}\') + framed(\'{"status": "ok", "variants": []}\'))'
    )
    run(cell, forger, arena)
    for _ in range(3):
        assert works(cell, good, arena)
