"""The course of a run: kernels that hang, builds that take long, a run that ends early."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.harness.fake_sanitizer import fake_tool
from verify.cell import under_tool
from verify.cell.discovery import roster
from verify.cell.process import PLAIN_CPU, ROOT
from verify.cuda.telling import told_by
from verify.evidence import Recorder, load
from verify.problem import Problem
from verify.problem.case import Case
from verify.sanitizers import building, course, exports, page, session
from verify.sanitizers.course import Course, worker_count
from verify.sanitizers.fault import PlantedFault
from verify.sanitizers.lane import GROUP, Lane
from verify.sanitizers.records import Record
from verify.sanitizers.report import LaneRun, told, write
from verify.sanitizers.results import PlantedSession, Rehearsed
from verify.sanitizers.session import NOT_RUN, Booth, Session, Subject, never_run
from verify.sanitizers.tool import Sanitizer

pytestmark = pytest.mark.for_ci

KERNEL = """
import ctypes, os, time
from pathlib import Path
from verify.variant import Support, Variant

BUILT = []

def fill(args, out, lse, workspace):
    out.fill_(1.0)
    lse.fill_(0.0)

def hangs(args, out, lse, workspace):
    fill(args, out, lse, workspace)
    if "UNDER_TOOL" in os.environ:
        Path(os.environ["NOTES"], f"{time.time()}").write_text(str(os.getpid()))
        time.sleep(1000)

def builds(args, out, lse, workspace):
    fill(args, out, lse, workspace)
    if BUILT or "UNDER_TOOL" not in os.environ:
        return
    BUILT.append(True)
    libc = ctypes.CDLL(None)
    libc.prctl(15, b"verify-builds", 0, 0, 0)  # PR_SET_NAME, as verify.cuda.telling does
    time.sleep(2.5)
    libc.prctl(15, b"kernel", 0, 0, 0)

SUPPORT = Support(dtypes=("float32",), head_dims=(8,), masks=("full",), layouts="contiguous")
VARIANTS = [
    Variant(name=entry.__name__, family="paper", forward=entry, support=SUPPORT)
    for entry in (hangs, builds, fill)
]
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fake tool; kernels leave notes in the folder `notes` beside it."""
    path = fake_tool(tmp_path / "tools")
    (path.parent / "notes").mkdir()
    monkeypatch.setenv("NOTES", str(path.parent / "notes"))
    return path


@pytest.fixture
def subjects(tmp_path: Path) -> dict[str, Subject]:
    """A subject of two cases for each variant, by name."""
    (tmp_path / "kernel.py").write_text(KERNEL, encoding="utf-8")
    found = {}
    for declaration in roster([tmp_path / "kernel.py"]).declarations:
        config = declaration.configs[0]
        cases = tuple(
            Case(declaration.ref, config.name, GROUP, problem)
            for n in (2, 3)
            for problem in [Problem(seqlen_q=n, seqlen_kv=n, head_dim=8, dtype="float32")]
        )
        found[declaration.name] = Subject(declaration, config, "float32", cases)
    return found


ENVIRONMENT = replace(PLAIN_CPU, variables=(("CUDA_VISIBLE_DEVICES", ""),))


@pytest.mark.long(6)
def test_a_hang_takes_one_deadline_and_a_build_takes_none(
    tool: Path, subjects: dict[str, Subject], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "DEADLINE", 2.0)
    booth = Booth(Sanitizer(str(tool), "2025.3.1.0"), ENVIRONMENT, tmp_path / "files")
    hanging = booth.sanitize("memcheck", subjects["hangs"], 0, "hangs")
    assert hanging.judgement.outcome == "inconclusive"
    assert [result.status for result in hanging.facts.results] == ["hang"]  # of two cases
    assert hanging.hang is not None
    assert "no answer within 2 s" in hanging.hang.against
    assert hanging.facts.summary is not None, "the tool wrote its files after the program's end"
    assert len(list((tool.parent / "notes").iterdir())) == 1
    assert hanging.seconds < 2.0 + under_tool._HANGING
    building_long = booth.sanitize("memcheck", subjects["builds"], 0, "builds")
    assert building_long.judgement.outcome == "clean"
    assert building_long.built > 2.0

    copy = PlantedFault(
        variant="hangs", file=tmp_path, about="a copy", caught_by=("memcheck",), copy_of="kernel"
    )
    for fault, caught in ((replace(copy, spare=True), True), (replace(copy, copy_of=""), False)):
        assert PlantedSession(fault, hanging).shown == caught
    assert not PlantedSession(copy, hanging).holds  # a hang does not show that the tool is alive
    run = lane_run(planted=(PlantedSession(replace(copy, spare=True), hanging),))
    assert not run.uncaught
    assert "| **hangs** | a copy | memcheck (it hangs) |" in page.markdown(told(run))


def test_after_a_hang_no_case_is_tried_alone(subjects: dict[str, Subject], tmp_path: Path) -> None:
    subject = subjects["hangs"]
    begun: list[Subject] = []

    class Hanging:
        """A fake `Booth` under which the first case hangs."""

        def sanitize(self, tool: str, subject: Subject, lane: int, name: str) -> Session:
            begun.append(subject)
            result = session.CaseResult(subject.cases[0].id, "hang", "hangs: no answer")
            facts = replace(never_run(tool, subject, "").facts, results=(result,))
            doubts = (f"{result.case}: hang: {result.against}",)
            return Session(tool, subject, session.Judgement("inconclusive", doubts), 1.0, facts)

    with Recorder(tmp_path) as recorder:
        lane = Lane(Hanging(), recorder, ("memcheck",), 1)  # type: ignore[arg-type]
        (tried,) = lane.try_all([Rehearsed(0, subject, {})])
    assert begun == [subject]
    assert set(tried.outcomes.values()) == {"inconclusive"}
    for verdict in load(tmp_path).verdicts:
        assert verdict.finding is not None
        assert "hangs: no answer" in verdict.finding.message


def test_a_process_that_proved_nothing_is_run_once_more(
    subjects: dict[str, Subject], tmp_path: Path
) -> None:
    """The only case of a process; why the first one proved nothing stays in the report."""
    (case, _) = subjects["fill"].cases
    subject = subjects["fill"].alone(case)
    for words, wanted in (
        (["inconclusive", "clean"], "clean"),
        (["inconclusive", "inconclusive"], "inconclusive"),
        (["faulty"], "faulty"),
    ):
        left = list(words)

        class Process:
            """A fake `Booth`."""

            def sanitize(self, tool: str, subject: Subject, lane: int, name: str) -> Session:
                outcome = left.pop(0)  # noqa: B023 - called in this turn alone
                records = (Record(tool=tool, kind="Precise"),) if outcome == "faulty" else ()
                reasons = ("out of memory",) if outcome == "inconclusive" else ()
                judgement = session.Judgement(outcome, reasons, records, len(records))
                return replace(never_run(tool, subject, ""), judgement=judgement)

        with Recorder(tmp_path / str(len(words)) / wanted) as recorder:
            lane = Lane(Process(), recorder, ("memcheck",), 1)  # type: ignore[arg-type]
            (tried,) = lane.try_all([Rehearsed(0, subject, {})])
        assert (tried.outcome, left) == (wanted, [])
        assert len(tried.sessions) == len(words)
        text = page.markdown(told(lane_run(tried=(tried,))))
        assert ("clean; out of memory" in text) == (wanted == "clean")


def lane_run(**more: Any) -> LaneRun:
    given = {"planted": (), **more}
    return LaneRun(run="r", device={}, sanitizer="1", tools=("memcheck",), whole=False, **given)


def test_what_did_not_fit_is_not_run_and_never_clean(
    subjects: dict[str, Subject], tmp_path: Path
) -> None:
    over = Course(limit=0.0, begun=time.monotonic() - 1.0)
    subject = subjects["fill"]
    with Recorder(tmp_path) as recorder:
        lane = Lane(None, recorder, ("memcheck",), 1, course=over)  # type: ignore[arg-type]
        rehearsed = lane.rehearse([(0, subject)], ENVIRONMENT)
        (tried,) = lane.try_all(rehearsed)
    assert (tried.outcome, set(tried.outcomes.values())) == (NOT_RUN, {NOT_RUN})
    assert not load(tmp_path).verdicts
    fault = PlantedFault(variant="fill", file=tmp_path, about="f", caught_by=("memcheck",))
    unrun = never_run("memcheck", subject, over.over())
    run = lane_run(planted=(PlantedSession(fault, unrun),), tried=(tried,), cut=over.over())
    assert not run.alive
    data = told(run)
    assert data["tried"][0]["processes"][0]["reasons"] == ["not run: the time of 0 s was over"]
    text = page.markdown(data)
    assert "it ended early: the time of 0 s was over" in text
    assert "2 of 2 not run" in text
    copy = PlantedSession(replace(fault, copy_of="kernel", spare=True), unrun)
    assert "| **fill** | f | **not run** |" in page.markdown(told(lane_run(planted=(copy,))))
    assert "was not run: this known-bad copy" in exports.junit(told(lane_run(planted=(copy,))))
    suite = ElementTree.fromstring(exports.junit(data).partition("\n")[2])
    assert len(suite.findall("testcase/error")) == 2
    (sarif,) = exports.sarif(data)["runs"]
    assert sarif["invocations"] == [{"executionSuccessful": False}]


def test_a_report_replaces_the_one_before_whole(tmp_path: Path) -> None:
    for cut in ("first", "second"):
        write(lane_run(cut=cut), tmp_path)
        assert json.loads((tmp_path / "sanitizer.json").read_text())["cut"] == cut
    assert not list(tmp_path.glob(".*"))


RUN = """
import io, sys
from dataclasses import replace
from pathlib import Path
from rich.console import Console
from verify.cell.process import PLAIN_CPU
from verify.cli.sanitize import sanitize
from verify.cli.sanitize_choice import Request
from verify.sanitizers import course, selection
from verify.sanitizers.planted import PlantedFault

course.EVERY = 0.5  # seconds between lines of progress
selection._DRAWS = 40
file = Path("kernel.py").resolve()
environment = replace(PLAIN_CPU, variables=(("CUDA_VISIBLE_DEVICES", ""),))
faults = (PlantedFault(variant="hangs", file=file, about="", twin=True),)
request = Request(kernels=(file,), tools=("memcheck",), quick=True, workers="2", faults=faults,
                  environment=environment, report_dir=Path("out"))
sys.exit(sanitize(request, Console(width=300)))
"""


@pytest.fixture
def run(
    tmp_path: Path, tool: Path, subjects: dict[str, Subject]
) -> Iterator[subprocess.Popen[str]]:
    """A run whose planted kernel hangs under the tool."""
    variables = os.environ | {
        "PATH": f"{tool.parent}:{os.environ['PATH']}",
        "CUDA_HOME": str(tool.parent),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", textwrap.dedent(RUN)]
    with subprocess.Popen(
        command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.long(12)
@pytest.mark.for_ci
def test_a_signal_writes_the_report_and_ends_every_process(
    run: subprocess.Popen[str], tool: Path, tmp_path: Path
) -> None:
    assert run.stdout is not None
    lines = []
    report = tmp_path / "out" / "sanitizer.json"
    # With a line of progress comes the report so far.
    while not (
        any("now memcheck on" in line for line in lines[-1:])
        and list((tool.parent / "notes").iterdir())
        and report.exists()
    ):
        lines.append(run.stdout.readline())
        assert lines[-1], "".join(lines)
    early = json.loads(report.read_text())
    assert early["cut"] == "it had not ended when this was written"
    run.send_signal(signal.SIGTERM)
    words, _ = run.communicate(timeout=30)
    assert run.returncode == 3, words
    assert "ended by SIGTERM: what was not tried is listed as not run" in words
    (note,) = (tool.parent / "notes").iterdir()
    assert _ended(int(note.read_text()))
    data = json.loads(report.read_text())
    assert data["cut"] == "ended by SIGTERM"
    assert [(p["outcome"], p["holds"]) for p in data["planted"]] == [(NOT_RUN, False)]
    outcomes = {word for one in data["tried"] for word in one["cases"].values()}
    assert outcomes <= {NOT_RUN}
    assert len(data["tried"]) + len(data["not_run"]) == 3
    assert data["stages"]["planted"]["processes"] == 1


def test_as_many_processes_as_cores_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "cores", lambda: 32)
    monkeypatch.setattr(course, "_memory", lambda: 256 << 30)
    for free, wanted in (("80000\n79000\n", 32), ("24000", 11), ("No devices", 32)):
        answer = SimpleNamespace(stdout=free)
        monkeypatch.setattr(course.subprocess, "run", lambda *_, _answer=answer, **__: _answer)
        assert worker_count("auto") == wanted
    monkeypatch.setattr(course, "_memory", lambda: 12 << 30)
    assert worker_count("auto") == 3
    assert worker_count("28") == 28


def test_a_line_of_progress_names_what_has_run_longest() -> None:
    running = Course()
    with running.process("variants", "memcheck on a"), running.process("variants", "skew on b"):
        line = running.line()
    assert "now memcheck on a 0 s, skew on b 0 s" in line
    assert running.stages["variants"].processes == 2
    assert "2 processes ended; now none" in running.line()


def test_a_program_tells_that_triton_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import compiler

    told: list[bool] = []
    monkeypatch.setattr(compiler, "compile", lambda *_, **__: told.append(told_by(os.getpid())))
    building.watch_triton()
    compiler.compile("source", target="sm_90a")
    assert told == [True]
    assert not told_by(os.getpid())
