"""A starter's forks behave as programs that Python starts, and what starts a program never fails
for want of a starter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.harness import program as target
from tests.harness.kernel_files import ENVIRONMENT, Writer, run
from verify.bundle import ROOT
from verify.cell.fork_server import environment_of
from verify.cell.process import Cell, ForkServer
from verify.machine import leash, starter

pytestmark = pytest.mark.usefixtures("own_starters")
MODULE = target.__name__
NAME = "tests"
VARIABLES = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def started(own_starters: None) -> None:
    """A starter that has imported the program."""
    starter.start(NAME, MODULE, VARIABLES)


def program(*words: str, output: int, **more: object) -> starter.Program:
    settings = {"environment": VARIABLES, **more}
    return starter.Program(module=MODULE, arguments=words, output=output, **settings)  # type: ignore[arg-type]


def ended(*words: str, name: str = NAME, forks: bool = True, **more: object) -> tuple[int, str]:
    """The exit code and the output of the program."""
    with tempfile.TemporaryFile("w+") as output:
        process = starter.launch(name, program(*words, output=output.fileno(), **more))
        assert isinstance(process, starter.Forked) == forks
        status = process.wait(60)
        output.seek(0)
        return status, output.read()


def told(*words: str, **more: object) -> dict[str, object]:
    status, text = ended("tell", *words, **more)  # type: ignore[arg-type]
    assert status == 0, text
    return dict(json.loads(text))


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("session", [True, False])
def test_a_fork_gets_what_a_program_gets(session: bool, tmp_path: Path) -> None:
    variables = {**VARIABLES, target.SAID: "said"}
    more = {"environment": variables, "directory": str(tmp_path), "session": session}
    found = told("one", "", "dré", **more)
    plain = told("one", "", "dré", name="none", forks=False, **more)
    assert found | {"parent": 0} == plain | {"parent": 0}
    assert found["words"] == ["one", "", "dré"]
    assert (found["word"], found["directory"], found["path"]) == ("said", *[str(tmp_path)] * 2)
    assert (found["leads"], found["input"], found["descriptors"]) == (session, "", [0, 1, 2])


@pytest.mark.usefixtures("started")
def test_a_fork_runs_on_the_cores_of_what_asks_for_it() -> None:
    """Those that the process has now, not those that it had when the starter began."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(before)})
        assert told()["cores"] == [max(before)]
    finally:
        os.sched_setaffinity(0, before)
    assert told()["cores"] == sorted(before)


@pytest.mark.usefixtures("started")
def test_the_leash_of_what_starts_it_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that took it for its own would end at once: its parent is another process."""
    variables = {**VARIABLES, target.SAID: "1"}
    for other, word in ((leash.PARENT, "1"), (target.SAID, None)):
        monkeypatch.setattr(leash, "PARENT", other)
        assert told(environment=variables)["word"] == word
        assert told(environment=variables, name="none", forks=False)["word"] == word


@pytest.mark.usefixtures("started")
def test_it_gets_descriptors_under_their_numbers(tmp_path: Path) -> None:
    with (tmp_path / "given").open("w+") as given, (tmp_path / "kept").open("w") as kept:
        given.write("words")
        given.seek(0)
        found = told(given=given.fileno(), keep=[kept.fileno()])
        assert found["input"] == "words"
        assert found["descriptors"] == [0, 1, 2, kept.fileno()]


@pytest.mark.usefixtures("started")
def test_it_ends_as_a_program_ends() -> None:
    for name, forks in ((NAME, True), ("none", False)):
        assert ended("exit", "0", name=name, forks=forks) == (0, "")
        assert ended("exit", "7", name=name, forks=forks) == (7, "")
        assert ended("kill", name=name, forks=forks) == (-signal.SIGKILL, "")
        status, output = ended("raise", name=name, forks=forks)
        assert status == 1
        assert output.splitlines()[-1] == "ValueError: as it was told"


@pytest.mark.usefixtures("started")
def test_it_can_be_waited_for_and_killed() -> None:
    with open(os.devnull, "w") as nothing:
        process = starter.launch(NAME, program("sleep", output=nothing.fileno()))
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    process.kill()
    assert process.wait(30) == process.poll() == process.returncode == -signal.SIGKILL
    process.kill()  # its process id can be another's by now


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONHASHSEED", "LD_LIBRARY_PATH"])
def test_what_only_a_start_of_python_reads_is_read_by_one(name: str) -> None:
    variables = {**VARIABLES, name: "3"}
    assert told(forks=False, environment=variables)["words"] == []


@pytest.mark.parametrize("threads", [None, "3"])
def test_a_root_asks_the_starter_that_it_is_a_fork_of(threads: str | None) -> None:
    """It has its own numbers of threads again; what it starts is no child of its own."""
    one = {**VARIABLES, "OMP_NUM_THREADS": "1"}
    starter.start(NAME, MODULE, one)
    other = {name: value for name, value in one.items() if name != "OMP_NUM_THREADS"}
    other |= {} if threads is None else {"OMP_NUM_THREADS": threads}
    found = rooted(other)
    assert found["parent"] == found["mine"] != os.getpid()
    assert (found["threads"], found["internal"]) == (threads, False)
    assert found["descriptors"] == [0, 1, 2]


ORDERLY = f"""
import os, sys
from verify.machine import starter
starter.start("own", {MODULE!r}, os.environ, session=True)
sleeper = starter.Program(module={MODULE!r}, arguments=["sleep"], environment=os.environ, output=2)
print(starter.launch("own", sleeper).pid, flush=True)
sys.stdin.read()
"""


def test_forks_of_a_starter_with_a_session_end_with_what_started_it() -> None:
    """Neither is leashed; Ctrl-C in a terminal reaches neither."""
    command = [sys.executable, "-c", ORDERLY]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as script:
        assert script.stdout is not None
        sleeper = int(script.stdout.readline())
        assert os.getpgid(sleeper) not in (os.getpgid(script.pid), sleeper)
    gone(sleeper)


@pytest.mark.usefixtures("started")
def test_a_root_that_needs_another_start_of_python_gets_one() -> None:
    found = rooted({**VARIABLES, "PYTHONHASHSEED": "3"})
    assert found["mine"] == os.getpid() != found["parent"]  # it has no starter to ask


def rooted(variables: dict[str, str]) -> dict[str, object]:
    """What a root prints that is told to adopt its starter."""
    with tempfile.TemporaryFile("w+") as output:
        root = program("adopt", NAME, output=output.fileno(), environment=variables)
        assert starter.launch_root(NAME, root).wait(60) == 0
        output.seek(0)
        return dict(json.loads(output.read()))


@pytest.mark.usefixtures("started")
def test_without_its_starter_a_program_is_started_by_python() -> None:
    parent = int(str(told()["parent"]))
    os.kill(parent, signal.SIGKILL)
    assert told(forks=False)["parent"] == os.getpid()
    assert not starter.has(NAME)


@pytest.mark.usefixtures("started")
def test_a_killed_starter_takes_its_forks_with_it() -> None:
    parent = int(str(told()["parent"]))
    with open(os.devnull, "w") as nothing:
        process = starter.launch(NAME, program("sleep", output=nothing.fileno()))
    os.kill(parent, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    gone(process.pid)


SCRIPT = f"""
import os, sys
from verify.machine import starter
import {MODULE} as program
starter.begin("own")
holds = sys.argv[1] == "itself" or not os.fork()
if holds:
    sys.argv = ["program", "hold", "own"]
    program.main()
else:
    sys.stdin.read()
"""


@pytest.mark.parametrize("holder", ["itself", "its child"])
def test_what_is_leashed_ends_with_its_holder(holder: str) -> None:
    """A script with a starter, or its child, starts a sleeper, prints its process id, and ends."""
    command = [sys.executable, "-c", SCRIPT, holder]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as script:
        assert script.stdout is not None
        gone(int(script.stdout.readline()))
        assert holder == "itself" or script.poll() is None


def gone(pid: int) -> None:
    until = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until, f"process {pid} goes on"
        time.sleep(0.01)


def test_a_kernel_holds_no_end_of_a_starter(write: Writer) -> None:
    """It could ask for a process that is not confined.  Its only socket is its own."""
    starter.start(starter.CELLS, "verify.cell.child", environment_of(ENVIRONMENT.variables))
    fork_server = ForkServer(ENVIRONMENT)
    cell = Cell(fork_server)
    try:
        reply = run(cell, write("raise ValueError(len(sockets()))"))
        assert isinstance(fork_server._process, starter.Forked)
        assert reply.message == "ValueError: 1"
    finally:
        cell.close()
        fork_server.close()
