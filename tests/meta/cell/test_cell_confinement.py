"""Confinement: which files and processes a kernel process can reach, and which it cannot."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from verify.cell import confinement
from verify.cell.confinement import Confinement
from verify.cell.process import PLAIN_CPU, ROOT, Cell, ForkServer, InfrastructureError

ENVIRONMENT = replace(PLAIN_CPU, variables=(("CUDA_VISIBLE_DEVICES", ""),), patience=20.0)
Tried = Callable[[str], str]

pytestmark = pytest.mark.skipif(not confinement.enabled(), reason=confinement.state())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's directory that holds evidence of earlier runs."""
    folder = tmp_path_factory.mktemp("user")
    (folder / ".verify" / "runs" / "one").mkdir(parents=True)
    (folder / ".verify" / "runs" / "one" / "main.jsonl").write_text("evidence", encoding="utf-8")
    (folder / ".verify" / "known-failures.txt").write_text("evidence", encoding="utf-8")
    (folder / "notes.txt").write_text("notes", encoding="utf-8")
    (folder / "link").symlink_to(".verify")
    return folder


@pytest.fixture(scope="module")
def cell(place: Path) -> Iterator[Cell]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("PYTEST_CURRENT_TEST", "accuracy")
        fork_server = ForkServer(ENVIRONMENT)
        cell = Cell(fork_server)
        yield cell
        cell.close()
        fork_server.close()


@pytest.fixture
def tried(cell: Cell, place: Path) -> Tried:
    """A function that runs statements in a kernel process; returns repr(found), or the exception's
    type."""

    def run(text: str) -> str:
        path = place / f"kernel{len(list(place.glob('kernel*')))}.py"
        body = textwrap.indent(textwrap.dedent(text), "    ")
        path.write_text(
            "import ctypes, os, signal, socket, subprocess, sys, tempfile\nfound ="
            f" None\ntry:\n{body}\nexcept BaseException as error:\n    found = type(error)\nraise"
            " ValueError(repr(found))\n",
            encoding="utf-8",
        )
        cell.restart()  # a process cannot read newer files on the path to the evidence
        reply = cell.load(str(path))
        assert reply.status == "raised", reply
        return reply.message.removeprefix("ValueError: ")

    return run


DENIED = "<class 'PermissionError'>"


@pytest.mark.parametrize(
    "path", [".verify/runs/one/main.jsonl", ".verify/known-failures.txt", "link/known-failures.txt"]
)
def test_evidence_cannot_be_read(tried: Tried, path: str) -> None:
    assert tried(f"found = open({path!r}).read()") == DENIED
    assert (
        tried(f"found = subprocess.run(['cat', {path!r}], capture_output=True).returncode") == "1"
    ), "nor by a child"


@pytest.mark.parametrize(
    "path",
    [
        "notes.txt",
        str(ROOT / "verify" / "campaign" / "judge.py"),
        str(ROOT / "kernels" / "torch" / "math.py"),
        "/etc/passwd",
    ],
)
def test_everything_else_can_be_read_and_not_written(tried: Tried, path: str) -> None:
    assert tried(f"found = len(open({path!r}).read()) > 0") == "True"
    assert tried(f"open({path!r}, 'a')") == DENIED
    assert tried(f"os.truncate({path!r}, 0)") == DENIED
    assert tried(f"os.unlink({path!r})") == DENIED
    assert tried(f"os.rename({path!r}, os.path.join(tempfile.gettempdir(), 'x'))") in (
        DENIED,
        "<class 'OSError'>",
    )


@pytest.mark.parametrize(
    "path", ["xfails.toml", ".verify/runs/one/forged.jsonl", "/tmp/shared-by-all", "/dev/pts/0"]
)
def test_nothing_new_can_be_written_beside_it(tried: Tried, path: str) -> None:
    assert tried(f"open({path!r}, 'w')") in (DENIED, "<class 'FileNotFoundError'>")
    assert not Path(path).exists() or path == "/dev/pts/0"


def test_a_process_has_scratch_of_its_own_and_the_caches(tried: Tried) -> None:
    body = """
    os.makedirs(tempfile.gettempdir() + '/a/b')
    open(tempfile.gettempdir() + '/a/b/part', 'w').write('x')
    # As compilers' caches do.
    os.replace(tempfile.gettempdir() + '/a/b/part', tempfile.gettempdir() + '/whole')
    inductor = os.environ['TORCHINDUCTOR_CACHE_DIR']
    for cache in ('~/.triton', '~/.cache', '~/.nv', inductor, '/dev/shm'):
        with tempfile.NamedTemporaryFile(dir=os.path.expanduser(cache)) as file:
            file.write(b'x')
    open('/dev/null', 'w').write('x')
    found = tempfile.gettempdir()
    """
    scratch = Path(tried(body).strip("'"))
    assert scratch.name.startswith("process-")
    tried("found = 1")  # its process ends before the next begins
    assert not scratch.exists()


def test_a_compiler_works(tried: Tried) -> None:
    body = """
    source = tempfile.gettempdir() + '/a.c'
    open(source, 'w').write('int main(void) { return 7; }')
    subprocess.run(['cc', source, '-o', source[:-2]], check=True)
    found = subprocess.run([source[:-2]]).returncode
    """
    assert tried(body) == "7"


def test_other_processes_are_out_of_reach(tried: Tried) -> None:
    assert tried("os.kill(os.getppid(), 0)") == DENIED
    assert tried("os.kill(os.getppid(), signal.SIGSTOP)") == DENIED
    for what in ("environ", "mem", "fd/0"):
        assert tried(f"open(f'/proc/{{os.getppid()}}/{what}', 'rb').read(1)") == DENIED
    assert tried("found = ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)") == "-1"
    assert tried("found = [name for name in os.environ if name.startswith('PYTEST_')]") == "[]"


def test_what_is_switched_off_is_said(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    assert confinement.state() == f"confined by Landlock (ABI {confinement.abi()})"
    monkeypatch.setenv("VERIFY_CONFINE", "0")
    assert confinement.state() == "not confined: VERIFY_CONFINE=0"
    assert confinement.confinement([place / ".verify"]) is None
    monkeypatch.delenv("VERIFY_CONFINE")
    for abi, words in (
        (0, "this kernel has no Landlock"),
        (1, "this kernel's Landlock is of ABI 1, 2 is needed"),
    ):
        monkeypatch.setattr(confinement, "abi", lambda abi=abi: abi)
        assert confinement.state() == f"not confined: {words}"
        assert confinement.confinement([place / ".verify"]) is None


def test_a_process_that_cannot_be_confined_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    monkeypatch.chdir(place)
    fork_server = ForkServer(ENVIRONMENT)
    cell = Cell(fork_server)
    try:
        cell.arch()
        cell.restart()
        # no path
        monkeypatch.setattr(fork_server, "_confinement", Confinement(cast(Any, (3,)), ()))
        with pytest.raises(InfrastructureError, match="did not start"):
            cell.arch()
    finally:
        cell.close()
        fork_server.close()


def test_more_can_be_made_writable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VERIFY_WRITABLE", f"{tmp_path / 'one'}{os.pathsep}{tmp_path / 'two'}")
    found = confinement.confinement([tmp_path])
    assert found is not None
    assert {str(tmp_path / "one"), str(tmp_path / "two")} <= set(found.writable)
    assert (tmp_path / "one").is_dir()


# The judge's modules.


@pytest.mark.parametrize(
    "name",
    [
        "references.attention",
        "references.blocks",
        "verify.campaign.judge",
        "verify.problem.inputs",
        "verify.tolerance.forward",
        "verify.cell.arena",
        "verify.judging.trial",
        "verify.cell.process",
        "verify.evidence",
    ],
)
def test_the_judges_modules_cannot_be_imported(tried: Tried, name: str) -> None:
    assert tried(f"import {name}") == "<class 'ImportError'>"
    assert tried(f"found = {name!r} in sys.modules") == "False"


@pytest.mark.parametrize(
    "name",
    [
        "verify.variant",
        "verify.problem",
        "references.masks",
        "references.score_mods",
        "verify.cuda.compile",
    ],
)
def test_what_kernels_need_can_be_imported(tried: Tried, name: str) -> None:
    assert tried(f"import {name}") == "None"
