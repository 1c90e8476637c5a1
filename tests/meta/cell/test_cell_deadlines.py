"""Deadlines of a kernel process: time to load, to build and to run, and its end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from tests.harness.kernel_files import (
    ENVIRONMENT,
    FILL,
    Writer,
    process_of,
    run,
)
from verify.cell import extension_locks
from verify.cell.process import Cell, ForkServer


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
