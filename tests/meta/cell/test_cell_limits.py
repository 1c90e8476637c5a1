"""Limits of a kernel process: its memory, its child processes, and what is no kernel file."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from tests.harness.kernel_files import (
    FILL,
    PROBLEM,
    Writer,
    kernel,
    process_of,
    run,
)
from verify.cell.arena import workspace_limit
from verify.cell.breach import Breach
from verify.cell.descendants import children, descendants
from verify.cell.discovery import roster
from verify.cell.limits import Output
from verify.cell.loading import load
from verify.cell.process import Cell, ForkServer
from verify.problem import Problem

# Memory.


def test_memory_that_a_run_keeps_is_measured(cell: Cell, write: Writer) -> None:
    leaks = write(f"kept.append(bytearray(b'x' * (100 << 20))); {FILL}", before="kept = []")
    run(cell, leaks)
    for _ in range(2):
        reply = run(cell, leaks)
        assert reply.ok
        assert 90 << 20 < reply.grown < 130 << 20
    keeps = write()
    run(cell, keeps)
    assert run(cell, keeps).grown < 8 << 20


def test_a_process_that_takes_too_much_is_ended_and_says_so(
    cell: Cell, write: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFY_LIFE_MEMORY", "0.5")
    good = write()
    greedy = write("kept = [bytearray(b'x' * (50 << 20)) for _ in range(20)]; time.sleep(30)")
    reply = run(cell, greedy)
    assert reply.status == "out of memory"
    assert "VERIFY_LIFE_MEMORY" in reply.message
    assert run(cell, good).ok
    leaks = write(f"kept.append(bytearray(b'x' * (200 << 20))); {FILL}", before="kept = []")
    before = cell.process_number
    for _ in range(4):
        reply = run(cell, leaks)
        assert reply.ok, "what a right kernel keeps is no wrong answer"
    assert cell.process_number > before


def test_memory_of_child_processes_counts(
    cell: Cell, write: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that keeps its memory in a child process has no more than another."""
    child = """
    if os.fork() == 0:
        kept = bytearray(b"x" * (400 << 20))
        time.sleep(60)
    time.sleep(15)
    """
    shares = f"""
    if os.fork() == 0:
        time.sleep(60)
    {FILL}
    """
    monkeypatch.setenv("VERIFY_LIFE_MEMORY", "1")
    shares_much = write(shares, before="kept = b'x' * (300 << 20)")
    for _ in range(4):
        assert run(cell, shares_much).ok
    assert cell.process_number == 1, "what children share with their parent counts once"
    monkeypatch.setenv("VERIFY_LIFE_MEMORY", "0.25")
    cell.restart()
    reply = run(cell, write(child))
    assert reply.status == "out of memory"
    assert "VERIFY_LIFE_MEMORY" in reply.message
    assert run(cell, write()).ok


def test_a_file_that_takes_too_much_memory_to_load_is_no_error_of_the_judge(
    cell: Cell, write: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFY_LIFE_MEMORY", "0.25")
    reply = run(cell, write(before="kept = b'x' * (200 << 20)"))
    assert reply.status == "out of memory"
    assert reply.message.startswith("loading it: ")
    assert run(cell, write()).ok


def test_what_a_kernel_prints_does_not_fill_the_disk(cell: Cell, write: Writer) -> None:
    prints = write(f"print('y' * (3 << 20), 'the end', flush=True); {FILL}")
    for _ in range(3):
        assert run(cell, prints).ok
        assert os.fstat(cell._output.file.fileno()).st_blocks * 512 <= cell.most_output
    cell.restart()
    reply = run(cell, write("print('y' * (3 << 20), 'the end', flush=True); os._exit(3)"))
    assert reply.message.startswith("exited with status 3")
    assert reply.message.endswith("the end")


def test_the_end_of_what_was_printed_is_kept_when_the_rest_is_dropped() -> None:
    output = Output(1 << 20)
    for text in (b"y" * (3 << 20) + b" the", b" end"):
        output.file.seek(0, os.SEEK_END)
        output.file.write(text)
        output.file.flush()
        output.shorten()
    assert os.fstat(output.file.fileno()).st_blocks * 512 <= 1 << 20
    assert output.end(12) == "yyyy the end"
    output.begin()
    assert output.end(12) == ""


def test_a_workspace_has_a_limit_that_honest_kernels_do_not_reach() -> None:
    small = PROBLEM
    large = Problem(
        batch=2, heads_q=8, heads_kv=8, seqlen_q=512, seqlen_kv=512, head_dim=128, dtype="float16"
    )
    assert workspace_limit(small) < 200 << 20 < 1900 << 20
    p = large
    splits = 64 * p.batch * p.heads_q * p.seqlen_q * (p.head_dim_v + 2) * 4
    scores = 4 * p.batch * p.heads_q * p.seqlen_q * p.seqlen_kv * 4
    assert max(splits, scores) < workspace_limit(large)


# Processes.


def test_a_grandchild_in_a_session_of_its_own_dies_with_its_kernel_process(
    cell: Cell, write: Writer, tmp_path: Path
) -> None:
    mark = tmp_path / "pids"
    forks = f"""
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 256)
                open({str(mark)!r}, "a").write(f"{{os.getpid()}}\\n")
                time.sleep(60)
            os._exit(0)
    while not os.path.exists({str(mark)!r}) or len(open({str(mark)!r}).read().split()) < 3:
        time.sleep(0.01)
    """
    for ending in ("out.fill_(1.0); lse.fill_(2.0)", "os._exit(1)"):
        mark.unlink(missing_ok=True)
        reply = run(cell, write(textwrap.dedent(forks) + ending))
        assert reply.ok is ("fill_" in ending), reply
        pids = [int(pid) for pid in mark.read_text(encoding="utf-8").split()]
        assert len(pids) == 3
        cell.restart()
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], (
            "a process outlived its kernel process"
        )


def test_a_bystanders_processes_are_spared(fork_server: ForkServer, write: Writer) -> None:
    keeps = write("subprocess.Popen(['sleep', '60']); out.fill_(1.0); lse.fill_(2.0)")
    one, other = Cell(fork_server), Cell(fork_server)
    try:
        assert run(one, keeps).ok
        assert run(other, keeps).ok
        below = descendants(other._pid)
        assert below
        one.close()
        assert descendants(other._pid) == below
        assert run(other, write()).ok
    finally:
        other.close()
    assert not children(process_of(fork_server))


# Files that are none.


def test_a_pipe_is_no_kernel_file_and_no_source(tmp_path: Path, write: Writer) -> None:
    pipe = tmp_path / "pipe.py"
    os.mkfifo(pipe)
    with pytest.raises(Breach, match="no such file"):
        load(pipe, str(tmp_path))
    module = f"m = types.ModuleType('m'); m.__file__ = {str(pipe)!r}"
    claims = write(before=f"import types, sys; {module}; sys.modules['m'] = m")
    begun = time.monotonic()
    listed = roster([claims])
    assert time.monotonic() - begun < 60
    assert not listed.entries
    assert "not a regular file" in listed.failures[0].message


def test_a_path_that_cannot_be_shown_is_said_to_be_one(tmp_path: Path, write: Writer) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.py"))
    shutil.copy(write(), path)
    failure = roster([path]).failures[0]
    failure.ref.encode()
    assert "\\udcff" in failure.ref
    assert "rename it" in failure.message


# Interpreted kernels.


@pytest.mark.parametrize("how", ["imported", "a module", "autotuned", "heuristics", "none"])
def test_an_interpreted_kernel_is_known_however_it_is_had(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths for a GPU are too long for the interpreter, so it must be known which one runs."""
    pytest.importorskip("triton")
    import triton.runtime.autotuner as tuner

    # as Triton calls it where it interprets; making one takes a fresh process
    class InterpretedFunction:
        def __init__(self, fn: object) -> None:
            self.fn = fn

    def wrap(fn: object, kind: type) -> object:
        made = kind.__new__(kind)
        made.fn = fn
        return made

    bare = InterpretedFunction(None)
    tuned = wrap(bare, tuner.Autotuner)
    helper = tmp_path / f"helper_{how.replace(' ', '_')}.py"
    helper.write_text("bare = HELD\n" if how != "none" else "bare = None\n", encoding="utf-8")
    held = {"autotuned": tuned, "heuristics": wrap(tuned, tuner.Heuristics)}.get(how, bare)
    monkeypatch.setitem(
        __builtins__ if isinstance(__builtins__, dict) else vars(__builtins__), "HELD", held
    )
    line = f"import {helper.stem}" if how == "a module" else f"from {helper.stem} import bare"
    path = tmp_path / f"kernel_{how.replace(' ', '_')}.py"
    path.write_text(kernel("pass", line), encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    try:
        assert load(path, str(tmp_path / "elsewhere")).interpreted is (how != "none")
    finally:
        sys.modules.pop(helper.stem, None)
        sys.modules.pop(f"kernel_{path.stem}", None)


torch.set_num_threads(1)
