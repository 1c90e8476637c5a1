"""Skew: delays at barriers, other occupancies and streams; bits that differ between seeds."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness.kernel_files import Writer
from verify.cell.arena import Arena
from verify.cell.child import KernelProcess
from verify.cell.discovery import roster
from verify.cell.process import PLAIN_CPU, Cell, Environment, ForkServer, Reply
from verify.cell.under_tool import Ended
from verify.cell.ways import UNBUILT
from verify.cuda import compile as cuda
from verify.cuda.compile import Source
from verify.problem import Problem
from verify.problem.case import Case
from verify.sanitizers import delays, skew
from verify.sanitizers.delays import Delays, extra_bytes
from verify.sanitizers.session import Session, Subject
from verify.variant import Binary, Resources

PROBLEM = Problem(seqlen_q=4, seqlen_kv=4, head_dim=8, dtype="float32")


# A kernel process's side.

BINARY = Binary(b"cubin", "flash", Resources(32, 100, 0, 0, 0))
BARRIER = "__syncthreads();\n"


class Compiler:
    """Stands in for the functions of `verify.cuda.compile`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[str] = []
        self.launched: list[int] = []
        self.kernel = object()
        monkeypatch.setattr(cuda, "compile_source", self.compile_source)
        monkeypatch.setattr(cuda, "load", lambda binary: self.kernel)
        monkeypatch.setattr(cuda, "launch", lambda *args: self.launched.append(args[3]))
        monkeypatch.setattr(delays, "_room", lambda: 200_000)

    def compile_source(self, source: Source, arch: str) -> Binary:
        self.compiled.append(source.path.read_text(encoding="utf-8"))
        return BINARY


@pytest.mark.parametrize("text", [BARRIER, "cp_async_wait<1>();\n", "int i;\n"])
def test_a_kernel_with_a_barrier_or_a_wait_is_built_with_delays(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFY_CUDA_CACHE", str(tmp_path / "cache"))
    compiler = Compiler(monkeypatch)
    path = tmp_path / "flash.cu"
    path.write_text(text)
    made = Delays()
    made.seed = 3
    made.install()
    kernel = cuda.load(cuda.compile_source(Source(path, "flash"), "sm_90a"))
    for shared_bytes in (0, 150_000, 199_900):
        cuda.launch(kernel, (1,), (32,), shared_bytes)
    known = text != "int i;\n"
    assert (f"verify_delay(2 * __LINE__); {text.strip()}" in compiler.compiled[0]) == known
    assert made.launches == 3 * known
    # as much as the device has, beside what the kernel has itself
    assert compiler.launched == [extra_bytes(3), 199_900, 199_900]


def test_an_error_of_a_build_with_delays_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFY_CUDA_CACHE", str(tmp_path / "cache"))
    compiler = Compiler(monkeypatch)

    def fails(source: Source, arch: str) -> Binary:
        raise cuda.CompileError("identifier is undefined")

    monkeypatch.setattr(compiler, "compile_source", fails)
    monkeypatch.setattr(cuda, "compile_source", fails)
    path = tmp_path / "flash.cu"
    path.write_text(BARRIER)
    with pytest.raises(delays.UnbuiltError) as error:
        Delays().compile_source(Source(path, "flash"), "sm_90a")

    def answer(self: KernelProcess, message: object, fds: object) -> dict[str, object]:
        raise error.value

    monkeypatch.setattr(KernelProcess, "_answer", answer)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reply = delays.DelayedKernelProcess(ours)._answer({}, [])
    assert (reply["status"], "identifier is undefined" in reply["message"]) == (UNBUILT, True)


def test_seeds_give_a_block_different_amounts_of_memory() -> None:
    assert len({extra_bytes(seed) for seed in skew.SEEDS}) == len(skew.SEEDS)
    assert all(0 < extra_bytes(seed) < 100_000 for seed in skew.SEEDS)


# The judge's side.

RACES = """
    way = open({seed!r}).read()
    out.fill_(1.0 + (way == "delays 3"))
    lse.fill_(0.0)
"""
FORGETS = """
    out.fill_(1.0)
"""
RIGHT = """
    out.fill_(1.0)
    lse.fill_(0.0)
"""


@pytest.fixture
def race(
    tmp_path: Path, fork_server: ForkServer, write: Writer, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Session]:
    """Races a kernel of that body: race(body, delayed=1, **contract)."""
    seed_file = tmp_path / "seed"

    def run(body: str, delayed: int = 1, unbuilt: str | None = None, **contract: bool) -> Session:
        class Process(Cell):
            output = ""
            hung = refused = ""
            built = 0.0

            def __init__(self, environment: Environment, prefix: object, program: str) -> None:
                super().__init__(fork_server)
                assert program == skew.PROGRAM

            def run(self, path: str, request: dict[str, Any], arena: Arena) -> Reply:
                if request["way"] == unbuilt:
                    return Reply(UNBUILT, "flash.cu for sm_90a: 6: NVRTC_ERROR_COMPILATION")
                seed_file.write_text(request["way"])
                reply = super().run(path, request | {"way": ""}, arena)
                return replace(reply, data={**reply.data, "delayed": delayed})

            def finish(self) -> None: ...

        monkeypatch.setattr(skew, "ToolCell", Process)
        (declaration,) = roster([write(body.format(seed=str(seed_file)))]).declarations
        declaration = replace(declaration, contract=replace(declaration.contract, **contract))
        config = declaration.configs[0]
        case = Case(declaration.ref, config.name, "sanitizer", PROBLEM)
        return skew.race(PLAIN_CPU, Subject(declaration, config, "float32", (case,)))

    return run


def test_bits_that_differ_between_seeds_are_a_race_with_its_seed(
    race: Callable[..., Session],
) -> None:
    session = race(RACES)
    (record,) = session.judgement.records
    assert (session.judgement.outcome, record.tool, record.kind) == ("faulty", "skew", "Race")
    assert "with delays of seed 3, out is 2 at out[b=0, h=0, q=0" in record.text
    assert "and 1 in a run of seed 0; 32 of 32 elements differ" in record.text


def test_a_right_kernel_is_clean_under_every_seed(race: Callable[..., Session]) -> None:
    session = race(RIGHT)
    assert session.judgement == skew.Judgement("clean")
    assert len(session.facts.results) == 1


def test_a_failing_run_is_told_with_its_seed(race: Callable[..., Session]) -> None:
    (record,) = race(FORGETS).judgement.records
    assert record.kind == "Run"
    assert record.text.startswith("seed 0: leaves 4 of 4 elements of lse unwritten")


@pytest.mark.parametrize("way", ["", "delays 3"])
def test_a_copy_with_delays_that_does_not_compile_accuses_no_kernel(
    way: str, race: Callable[..., Session]
) -> None:
    session = race(RIGHT, unbuilt=way)
    assert session.judgement.outcome == "inconclusive"
    (doubt,) = session.judgement.reasons
    assert "does not compile with delays: flash.cu for sm_90a" in doubt


def test_a_kernel_whose_own_error_reads_like_that_is_accused(race: Callable[..., Session]) -> None:
    session = race("""
    class UnbuiltError(RuntimeError): pass
    raise UnbuiltError("flash.cu for sm_90a: 6: NVRTC_ERROR_COMPILATION")
    # {seed!r}
""")
    (record,) = session.judgement.records
    assert "UnbuiltError: flash.cu for sm_90a" in record.text


def test_what_was_not_tried_is_told(race: Callable[..., Session]) -> None:
    session = race(RIGHT, delayed=0)
    assert session.judgement == skew.Judgement("clean", (skew.NOT_DELAYED,))
    session = race(RACES, deterministic=False)
    assert session.judgement == skew.Judgement("clean", (skew.NOT_COMPARED,))


@pytest.mark.long(3)
def test_the_program_serves_with_delays(write: Writer) -> None:
    (declaration,) = roster([write(RIGHT)]).declarations
    config = declaration.configs[0]
    case = Case(declaration.ref, config.name, "sanitizer", PROBLEM)
    environment = replace(PLAIN_CPU, variables=(("CUDA_VISIBLE_DEVICES", ""),))
    session = skew.race(environment, Subject(declaration, config, "float32", (case,)), (1,))
    assert session.judgement == skew.Judgement("clean", (skew.NOT_DELAYED,))


def test_a_hang_with_delays_is_a_record(
    race: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(self: object, case: object, cell: Any, arena: object) -> None:
        cell.hung = "no answer within 30 s; killed"
        raise Ended

    monkeypatch.setattr(skew._Race, "_case", ends)
    session = race(RIGHT)
    (record,) = session.judgement.records
    assert record.text == "with delays it hangs: no answer within 30 s; killed"
    assert session.hang is not None
