"""ConSan: what it prints, the facts about its process, and the proof that it watched a kernel.

Its words are those of Triton 3.8's ConSan; the lines around them are the CUDA runtime's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import triton

from kernels.triton.compile import compilable, compiled
from tests.harness.kernel_files import Writer
from tests.harness.sanitizer_facts import right_facts
from tests.harness.warm_child import warm
from tests.planted import tiny_gluon, tiny_partitions
from verify.cell.discovery import roster
from verify.cell.process import PLAIN_CPU, ForkServer
from verify.machine import other_triton
from verify.problem import Problem
from verify.problem.case import Case
from verify.sanitizers import binaries, instrumented, ledger
from verify.sanitizers.assertions import OWN, kind_of, read_assertions
from verify.sanitizers.binaries import Built
from verify.sanitizers.exceptions import LIMITS
from verify.sanitizers.facts import CaseResult, Judgement
from verify.sanitizers.failures import failures
from verify.sanitizers.instrumented import excludes, judged, limit_of
from verify.sanitizers.lane import _planted_subjects
from verify.sanitizers.planted import FAULTS, GLUON, GLUON_COPIES
from verify.sanitizers.results import PlantedSession, not_alive
from verify.sanitizers.session import Session, Subject
from verify.sanitizers.tool import ALL, CONSAN, EVERY, SKEW, TOOLS
from verify.variant import Declaration

torch.set_num_threads(1)

WRITES = "Buffer being accessed has outstanding writes. Operand: A"
PLACE = (
    "/home/me/hopper_forward.py:130: _hopper_forward: block: [{block},0,0], thread: [{thread},0,0]"
)


def line(text: str = WRITES, block: int = 3, thread: int = 64) -> str:
    return f"{PLACE.format(block=block, thread=thread)} Assertion `{text}` failed.\n"


# What it prints.


def test_threads_at_one_assertion_are_one_record() -> None:
    output = "Some words\n" + line() + line(thread=65) + line(block=4) + line("Deadlock detected")
    race, deadlock = read_assertions(output, CONSAN)
    assert (race.tool, race.kind, race.level) == (CONSAN, "Race", "Error")
    assert race.text == f"{WRITES} (3 threads)"
    assert (race.block, race.thread) == ("(3, 0, 0)", "(64, 0, 0)")
    assert (race.kernel, race.source) == ("_hopper_forward", "/home/me/hopper_forward.py:130")
    assert (deadlock.kind, deadlock.text) == ("Deadlock", "Deadlock detected")


def test_the_place_of_an_assertion_can_have_colons() -> None:
    place = "<missing-wait: hopper_forward.py>"
    said = line().replace("/home/me/hopper_forward.py", place)
    assert said.startswith(f"{place}:130: ")
    (record,) = read_assertions(said, CONSAN)
    assert (record.kind, record.source) == ("Race", f"{place}:130")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (WRITES, "Race"),
        ("Buffer being accessed has outstanding reads", "Race"),
        ("Accessing buffer with pending access. Pending access type: async_copy", "Race"),
        ("Deadlock detected", "Deadlock"),
        ("Barrier arrive underflow: current count would become negative", "Barrier"),
        ("Barrier re-initialized without prior invalidation", "Barrier"),
        ("index out of range", OWN),
    ],
)
def test_the_kind_of_an_assertion_is_read_from_its_words(text: str, kind: str) -> None:
    assert kind_of(text) == kind
    (record,) = read_assertions(line(text), CONSAN)
    assert record.kind == kind


def test_other_words_are_no_record() -> None:
    assert read_assertions("RuntimeError: CUDA error: device-side assert triggered\n", CONSAN) == ()


# The facts.

RUN = (ledger.Launched("_hopper_forward", "kernels/gluon/hopper_forward.py:290 in forward"),)
RIGHT = right_facts(CONSAN, RUN)
WATCHED = (Built("_hopper_forward", 57344, True), Built("_tables", 0, False))
RECORDS = read_assertions(line(), CONSAN)


def test_a_process_whose_facts_agree_is_clean() -> None:
    assert judged(RIGHT, WATCHED).outcome == "clean"


def test_an_assertion_and_a_failing_launch_are_a_finding() -> None:
    fails = replace(RIGHT, results=(CaseResult("case", "raised"),), records=RECORDS, exit_code=1)
    judgement = judged(fails, WATCHED)
    assert (judgement.outcome, judgement.records, judgement.total) == ("faulty", RECORDS, 1)


@pytest.mark.parametrize(
    ("changed", "built", "why"),
    [
        ({"records": RECORDS}, WATCHED, "every launch ended well"),
        ({"results": (CaseResult("case", "raised", "raises: x"),)}, WATCHED, "raised: raises: x"),
        ({"results": (CaseResult("case", "hang", "hangs"),)}, WATCHED, "hang"),
        ({"results": ()}, WATCHED, "0 of 1 cases were run"),
        ({"results": (CaseResult("case", "ok", "it is poison"),)}, WATCHED, "prove a launch"),
        ({"exit_code": None}, WATCHED, "a kill"),
        ({"exit_code": 134}, WATCHED, "exit code 134"),
        ({"launches": ((),)}, WATCHED, "launched no kernel"),
        ({"launches": None}, WATCHED, "no readable ledger of its launches"),
        ({"doubts": ("it did not connect",)}, WATCHED, "did not connect"),
        ({}, None, "no readable ledger of its builds"),
        ({}, (), "no kernel was instrumented"),
        ({}, (replace(WATCHED[0], changed=False),), "no kernel was instrumented"),
        ({}, (WATCHED[0], Built("_merge", 64, False)), "_merge was not instrumented"),
    ],
)
def test_facts_that_disagree_prove_nothing(
    changed: dict[str, Any], built: tuple[Built, ...] | None, why: str
) -> None:
    judgement = judged(replace(RIGHT, **changed), built)
    assert judgement.outcome == "inconclusive"
    assert any(why in reason for reason in judgement.reasons), judgement.reasons


def test_the_ledger_holds_launches_and_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "launches.jsonl"
    assert binaries.read(path) is None
    monkeypatch.setenv(ledger.VARIABLE, str(path))
    ledger.begin_run()
    ledger.write_binary("_flash", 128, changed=True)
    ledger._write({"kernel": "_flash", "frame": "here"})
    assert ledger.read(path) == ((ledger.Launched("_flash", "here"),),)
    assert binaries.read(path) == (Built("_flash", 128, True),)
    path.write_text(json.dumps({"binary": "_flash"}) + "\n")
    assert binaries.read(path) is None


# The proof that it watched.


@pytest.mark.for_ci
@pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")
@pytest.mark.long(6)
def test_a_build_is_compared_with_the_one_without_instrumentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "launches.jsonl"
    monkeypatch.setenv(ledger.VARIABLE, str(path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    tensors = [torch.empty(300, tiny_gluon.COLUMNS, device="meta") for _ in range(2)]
    with triton.knobs.compilation.scope():
        binaries.watch()
        for mode in ("", "consan", "no such mode"):
            launch = tiny_gluon.launch_of("planted-gluon-dropped-wait", *tensors)
            launch.keywords["instrumentation_mode"] = mode
            triton.knobs.compilation.instrumentation_mode = mode
            compiled(launch, "sm_90a")
    built = binaries.read(path)
    assert built is not None
    assert [(one.kernel, one.changed) for one in built] == [
        ("_planted_gluon", True),
        ("_planted_gluon", False),  # a mode that this Triton does not know is no error there
    ]
    assert all(one.shared for one in built)
    assert binaries.doubts(built[:1]) == []
    (doubt,) = binaries.doubts(built[1:])
    assert "no kernel was instrumented" in doubt


# A process.

RIGHT_BODY = """
    out.fill_(1.0)
    lse.fill_(0.0)
"""
PROBLEM = Problem(seqlen_q=4, seqlen_kv=4, head_dim=8, dtype="float32")


@pytest.fixture
def session(write: Writer, fork_server: ForkServer, tmp_path: Path) -> Callable[[str], Session]:
    """A session of a kernel of that body, on the CPU."""

    def run(body: str) -> Session:
        (declaration,) = roster([write(body)], fork_server).declarations
        config = declaration.configs[0]
        case = Case(declaration.ref, config.name, "sanitizer", PROBLEM)
        subject = Subject(declaration, config, "float32", (case,))
        environment = replace(PLAIN_CPU, variables=(("CUDA_VISIBLE_DEVICES", ""),))
        return instrumented.sanitize(CONSAN, environment, subject, tmp_path / "files")

    return run


@pytest.mark.for_ci
@pytest.mark.long(6)
def test_a_process_is_judged_by_what_it_prints(
    session: Callable[[str], Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f"""
    import os, sys
    assert os.environ["TRITON_INSTRUMENTATION_MODE"] == "consan"
    print({line()!r}, file=sys.stderr)
    raise RuntimeError("CUDA error: device-side assert triggered")
    """
    found = session(body)
    assert found.judgement.outcome == "faulty"
    (case,) = found.subject.cases
    (failure,) = failures(case, found.subject, found, shared=False)
    assert failure.record is not None
    assert failure.message == f"Race: {WRITES} (Triton {other_triton.version()})"
    assert failure.replay.endswith("--tool consan")
    warm(monkeypatch)
    clean = session(RIGHT_BODY)
    assert clean.judgement.outcome == "clean"


def test_a_kernel_that_a_version_does_not_build_is_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert {limit.version for limit in LIMITS} == {"3.7", "3.8"}
    said = f"flash.py:140:17: {LIMITS[0].words}\n"
    versions = {"3.7.1": True, "3.8.0": True, "3.80.0": False, "3.9.0": False, None: False}
    for version, covered in versions.items():
        monkeypatch.setattr(other_triton, "version", lambda version=version: version)
        assert (limit_of(CONSAN, said) is not None) == covered
        assert limit_of(CONSAN, "error: something else") is None


# What it is for.


def test_it_is_for_what_triton_compiles(
    monkeypatch: pytest.MonkeyPatch, write: Writer, fork_server: ForkServer
) -> None:
    files = [write(RIGHT_BODY), write(RIGHT_BODY, "# by way of triton\n")]
    plain, own = roster(files, fork_server).declarations
    assert "instruments what Triton compiles" in str(excludes(CONSAN, plain))
    assert excludes(CONSAN, replace(plain, family="gluon")) is None
    assert excludes(CONSAN, own) is None
    clusters = replace(
        plain, family="gluon", configs=(replace(plain.configs[0], options=(("ctas", 2),)),)
    )
    assert "does not know the barrier of a cluster" in str(excludes(CONSAN, clusters))


def test_its_faults_are_tried_under_it_and_under_no_tool_that_cannot_take_them() -> None:
    partitions = tiny_partitions.VARIANT.name
    assert {fault.variant for fault in GLUON} == {*tiny_gluon.KINDS, partitions}
    for fault in GLUON:
        if fault.cluster:
            assert fault.tried_under(ALL) == (SKEW,)
            assert fault.caught_by == ()
            continue
        assert fault.tried_under(ALL) == ((*TOOLS, CONSAN) if fault.twin else (SKEW, CONSAN))
        assert fault.twin == (CONSAN not in fault.caught_by)
    for fault in GLUON_COPIES:  # other faults show that the tool is alive
        assert fault.tried_under(ALL) == fault.caught_by
        assert fault.caught_by in (("memcheck",), (SKEW,) if fault.cluster else (CONSAN,))
    others = [fault for fault in FAULTS if fault not in (*GLUON, *GLUON_COPIES)]
    assert not any(CONSAN in fault.tried_under(ALL) for fault in others)
    assert CONSAN not in EVERY  # a run that names no tool does not need a Triton


def test_a_tool_without_a_planted_fault_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not_alive((CONSAN, "memcheck"), []) == {CONSAN}
    sessions = {"clean": Judgement("clean"), "faulty": Judgement("faulty", (), RECORDS, 1)}
    twin, wrong = GLUON[0], GLUON[2]
    for fault, outcome, dead in (
        (twin, "clean", True),  # a tool that never catches anything does that, too
        (twin, "faulty", True),
        (wrong, "clean", True),
        (wrong, "faulty", False),
    ):
        tried = cast(Subject, SimpleNamespace(cases=("one",)))
        session = Session(CONSAN, tried, sessions[outcome], 0.0, RIGHT)
        assert (CONSAN in not_alive((CONSAN,), [PlantedSession(fault, session)])) == dead

    class Nothing:
        """A roster of files that lack Triton."""

        declarations: tuple[Declaration, ...] = ()
        failures = ()

    monkeypatch.setattr("verify.sanitizers.lane.roster", lambda files: Nothing())
    assert _planted_subjects(GLUON) == {}


# What an H100 printed, with Triton 3.8.0.


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dropped-wait", "outstanding writes"),
        ("early-copy-read", "outstanding|pending"),
        ("cluster-correct", "outstanding reads"),  # why clusters are not tried
    ],
)
def test_recorded_assertions_are_records(name: str, words: str) -> None:
    folder = Path(__file__).parent / "data" / "triton-3.8.0"
    text = (folder / f"{name}.txt").read_text(encoding="utf-8")
    (record,) = read_assertions(text, CONSAN)
    assert record.kind == "Race"
    assert re.search(words, str(record))
    assert "tiny_gluon.py" in str(record)
