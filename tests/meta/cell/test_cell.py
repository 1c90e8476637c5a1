"""Cells: a kernel's effect on its process becomes a reply, and the next request gets a fresh
process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.harness.kernel_files import FILL, PROBLEM, REQUEST, WHERE, Writer, run, works
from tests.harness.laid import damage, laid
from verify.cell.arena import Arena
from verify.cell.process import Cell
from verify.problem.inputs import tensors

torch.set_num_threads(1)


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
    "a device that others have": (
        "raise RuntimeError('CUDA error: CUDA-capable device(s) is/are busy or unavailable')",
        "device busy",
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
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
    "abort with a reason before many stacks": (
        "print(\"terminate called after throwing an instance of 'E'\\n  what():  no thread\\n\""
        " + 300 * 'Thread 0x7f (most recent call first):\\n', file=sys.stderr, flush=True);"
        " os.abort()",
        "crash",
        "killed by SIGABRT\nterminate called after throwing an instance of 'E'\n"
        "what():  no thread\n",
    ),
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
    runs = laid(arena, WHERE, tensors(PROBLEM).named)
    reply = cell.run(str(bad), REQUEST, arena)
    assert reply.status == "crash"
    found = damage(runs)
    assert found is None or found.slot == "redzone"
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
