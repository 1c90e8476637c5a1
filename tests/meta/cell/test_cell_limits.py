"""Limits of a kernel process: time to build and to run, memory, and its child processes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from tests.harness.kernel_files import (
    ENVIRONMENT,
    FILL,
    PROBLEM,
    Writer,
    kernel,
    process_of,
    run,
)
from verify.cell import extension_locks
from verify.cell.arena import workspace_limit
from verify.cell.breach import Breach
from verify.cell.descendants import children, descendants
from verify.cell.discovery import roster
from verify.cell.loading import load
from verify.cell.process import Cell, ForkServer
from verify.problem import Problem

# Time.


def test_loading_has_a_deadline_of_its_own(
    fork_server: ForkServer, write: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that compiles at import takes longer than a run is allowed to take."""
    slow = write(before="import time; time.sleep(1.5)")
    cell = Cell(fork_server)
    cell.environment = replace(ENVIRONMENT, patience=0.5)
    monkeypatch.setenv("VERIFY_DEADLINE", "0.5")
    try:
        assert cell.load(str(slow)).ok
        monkeypatch.setenv("VERIFY_BUILD_DEADLINE", "0.6")
        cell.restart()
        reply = cell.load(str(slow))
        assert reply.status == "hang"
        assert "VERIFY_BUILD_DEADLINE" in reply.message
    finally:
        cell.close()


def test_a_compiler_stops_the_clock_of_a_run_and_nothing_else_does(
    cell: Cell, write: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "nvcc"
    shutil.copy(shutil.which("sleep") or "sleep", compiler)  # by its name
    monkeypatch.setenv("VERIFY_DEADLINE", "1")
    builds = write(f"subprocess.run([{str(compiler)!r}, '2.5'], check=True); {FILL}")
    assert run(cell, builds).ok
    monkeypatch.setenv("VERIFY_BUILD_DEADLINE", "1")
    cell.restart()
    assert run(cell, builds).status == "hang"
    assert run(cell, write("subprocess.run(['sleep', '30'])")).status == "hang"


NVRTC = """
from verify.cuda import compile as cuda

cuda.compilable = lambda: None
cuda._key = lambda source, arch: "kernel"
cuda._compile = lambda source, arch: time.sleep(source)
cuda._keep = lambda entry, binary: None
"""


def test_a_compiler_in_the_process_stops_the_clock_and_so_does_waiting_for_another(
    cell: Cell, write: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFY_DEADLINE", "1")
    monkeypatch.setenv("VERIFY_CUDA_CACHE", str(tmp_path))
    assert run(cell, write(f"cuda.compile_source(2.5, 'sm_90a'); {FILL}", before=NVRTC)).ok
    waits = write(f"cuda.compile_source(0.0, 'sm_90a'); {FILL}", before=NVRTC)
    with FileLock(tmp_path / "kernel.lock", thread_local=False) as lock:
        threading.Timer(2.5, lock.release, kwargs={"force": True}).start()
        assert run(cell, waits).ok
    # What comes after the build counts.
    idle = write("cuda.compile_source(0.0, 'sm_90a'); time.sleep(30)", before=NVRTC)
    assert run(cell, idle).status == "hang"


@pytest.mark.skipif(
    shutil.which("g++") is None or shutil.which("ninja") is None,
    reason="no C++ compiler, or no ninja",
)
def test_a_build_that_was_killed_does_not_hold_up_the_next(
    fork_server: ForkServer, write: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's baton is a file that outlives its process; the next build would wait for its removal
    for ever."""
    folder, slowly = tmp_path / "build", tmp_path / "slowly"
    folder.mkdir()
    (tmp_path / "tiny.cpp").write_text("int tiny() { return 1; }\n", encoding="utf-8")
    slowly.write_text(
        '#!/bin/sh\ncase "$*" in *tiny.cpp*) mkdir slept && sleep 3;; esac\nexec g++ "$@"\n',
        encoding="utf-8",
    )
    slowly.chmod(0o755)
    builds = write(
        before=f"""
        import os
        os.environ["CXX"] = {str(slowly)!r}
        os.environ["PATH"] = {os.path.dirname(sys.executable)!r} + ":" + os.environ["PATH"]
        from torch.utils.cpp_extension import load
        sources = [{str(tmp_path / "tiny.cpp")!r}]
        load("tiny", sources, build_directory={str(folder)!r}, is_python_module=False)
        """
    )
    cell = Cell(fork_server)
    cell.environment = replace(ENVIRONMENT, patience=0.5)
    try:
        monkeypatch.setenv("VERIFY_BUILD_DEADLINE", "2.5")
        reply = cell.load(str(builds))
        assert reply.status == "hang", reply
        assert not (folder / "lock").exists()
        monkeypatch.setenv("VERIFY_BUILD_DEADLINE", "120")
        assert cell.load(str(builds)).ok
    finally:
        cell.close()


def test_a_baton_that_somebody_holds_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    held, left = tmp_path / "py" / "held" / "lock", tmp_path / "py" / "left" / "lock"
    for path in (held, left):
        path.parent.mkdir(parents=True)
        path.touch()
    with held.open("rb"):
        assert extension_locks.held_by(os.getpid()) == {held}
        extension_locks.clear()
        assert (held.exists(), left.exists()) == (True, False)
    extension_locks.clear()
    assert not held.exists()


def test_a_reply_that_drips_ends_at_the_deadline(
    cell: Cell, write: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFY_DEADLINE", "1")
    drips = write("""
        (fd,) = sockets()
        os.write(fd, struct.pack("<I", 100000))
        while True:
            os.write(fd, b" ")
            time.sleep(0.02)
        """)
    begun = time.monotonic()
    assert run(cell, drips).status == "hang"
    assert time.monotonic() - begun < 10
    assert run(cell, write()).ok


def test_a_stopped_fork_server_is_replaced(write: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verify.cell.fork_server._CONTROL_TIMEOUT", 2.0)
    monkeypatch.setattr("verify.cell.fork_server._END_TIMEOUT", 5.0)
    fork_server = ForkServer(ENVIRONMENT)
    cell = Cell(fork_server)
    try:
        good = write()
        assert run(cell, good).ok
        before = process_of(fork_server)
        os.kill(before, signal.SIGSTOP)
        cell.restart()
        assert run(cell, good).ok
        assert process_of(fork_server) != before
    finally:
        cell.close()
        fork_server.close()


def test_the_end_of_the_judge_leaves_no_scratch(write: Writer) -> None:
    fork_server = ForkServer(ENVIRONMENT)
    cell = Cell(fork_server)
    assert run(cell, write(f"open(os.environ['TMPDIR'] + '/made', 'w').write('x'); {FILL}")).ok
    folder, process, control = (
        Path(fork_server._scratch),
        fork_server._process,
        fork_server._control,
    )
    assert process is not None
    assert control is not None
    assert list(folder.glob("*/made"))
    control.shutdown(socket.SHUT_RDWR)  # as when the judge is killed
    process.wait(20)
    assert not folder.exists()
    cell.close()
    fork_server.close()


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
