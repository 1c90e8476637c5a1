"""The complete sanitizer lane, with a fake tool (`tests.harness.paper_tool`)."""

from __future__ import annotations

import io
import json
import re
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from references.masks import Causal
from tests.harness.paper_tool import KERNEL, PAPER_TOOL, PLANTED
from tests.harness.shared_fork_server import SharedForkServer
from tests.harness.warm_child import warm
from verify.campaign.runner import CLEAN, FAILED, INFRASTRUCTURE, USAGE
from verify.cell.process import PLAIN_CPU, Environment
from verify.cli.sanitize import sanitize
from verify.cli.sanitize_choice import Request
from verify.evidence import Evidence, load
from verify.problem.case import Case
from verify.sanitizers import ledger
from verify.sanitizers.exceptions import Waiver
from verify.sanitizers.facts import Facts, Judgement
from verify.sanitizers.fault import PlantedFault
from verify.sanitizers.lane import GROUP
from verify.sanitizers.session import Session, Subject
from verify.sanitizers.skew import NOT_DELAYED

pytestmark = pytest.mark.for_ci

SAMPLES = """
import torch

def late(args, out):
    if args.mask.kind == "causal":
        tell("memcheck|late|Invalid __global__ read of size 4 bytes")

def dies(args, out):
    if "PAPER" in os.environ:
        os.abort()

def lazy(args, out):
    if "PAPER" in os.environ:
        out.view(torch.int32).view(-1)[0] = 0x7FFD7FFD  # the poison that was there before

VARIANTS = [
    variant("right", lambda args, out: None),
    variant("late", late, masks=("full", "causal.square")),
    variant("untold", lambda args, out: tell("!no xml")),
    variant("dies", dies),
    variant("lazy", lazy),
    variant("raises", lambda args, out: 1 / 0),
]
"""
INCONCLUSIVE = {"untold": "left no records.xml", "dies": "crash", "lazy": "prove a launch"}


@dataclass(frozen=True)
class Outcome:
    """The results of a run of the lane: its exit code, its output, its evidence and its report."""

    status: int
    words: str
    evidence: Evidence | None
    report: dict[str, object]


class Lane:
    """The lane in a separate folder, with kernels and the fake tool."""

    def __init__(self, folder: Path, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        monkeypatch.chdir(folder)
        monkeypatch.setenv("PATH", str(tools))
        monkeypatch.setenv("CUDA_HOME", str(tools))
        self.planted = self.file("planted.py", PLANTED)
        self.faults = (
            PlantedFault(variant="right", file=self.planted, about="right", twin=True),
            PlantedFault(
                variant="overruns",
                file=self.planted,
                about="o",
                caught_by=("memcheck",),
                shows=("overruns", "write"),
            ),
            PlantedFault(
                variant="races",
                file=self.planted,
                about="r",
                caught_by=("racecheck",),
                shows=("races", "race"),
            ),
        )

    def file(self, name: str, variants: str) -> Path:
        path = self.folder / name
        path.write_text(KERNEL + textwrap.dedent(variants), encoding="utf-8")
        return path

    def run(self, **wanted: object) -> Outcome:
        arguments = io.StringIO()
        environment = replace(PLAIN_CPU, variables=(("CUDA_VISIBLE_DEVICES", ""),))
        request = Request(
            **{"environment": environment, "faults": self.faults, "workers": "2", **wanted}
        )  # type: ignore[arg-type]
        status = sanitize(request, Console(file=arguments, width=300))
        runs = sorted((self.folder / ".verify" / "runs").glob("*"))
        paths = [run / "sanitizer.json" for run in runs]
        report = json.loads(paths[-1].read_text()) if paths and paths[-1].exists() else {}
        return Outcome(status, arguments.getvalue(), load(runs[-1]) if runs else None, report)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the fake tool: one for all tests, so that their environments are equal."""
    folder = tmp_path_factory.mktemp("tools")
    tool = folder / "compute-sanitizer"
    tool.write_text(f"#!{sys.executable}\n{PAPER_TOOL}", encoding="utf-8")
    tool.chmod(0o755)
    return folder


@pytest.fixture
def lane(tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch) -> Lane:
    """A lane whose programs are forks and which chooses among few problems."""
    warm(monkeypatch)
    monkeypatch.setattr("verify.sanitizers.lane.ForkServer", SharedForkServer)
    monkeypatch.setattr("verify.sanitizers.selection._DRAWS", 40)
    return Lane(tmp_path, tools, monkeypatch)


def name_of(ref: str) -> str:
    return ref.rpartition("@")[2]


@pytest.mark.long(9)
def test_a_run_judges_each_kernel_by_its_own_records(lane: Lane) -> None:
    file = lane.file("kernel.py", SAMPLES)
    result = lane.run(
        kernels=(file,), quick=True, tools=("memcheck",), report_dir=lane.folder / "out"
    )
    assert result.status == FAILED
    assert result.evidence is not None
    assert not result.evidence.lost
    assert {(name_of(v.variant), v.oracle, v.outcome) for v in result.evidence.verdicts} == {
        ("right", "memcheck", "pass"),
        ("late", "memcheck", "fail"),  # where it is causal
        ("late", "memcheck", "pass"),  # where it is not
        ("untold", "memcheck", "fail"),
        ("dies", "memcheck", "fail"),
        ("lazy", "memcheck", "fail"),
        ("raises", "execution", "fail"),
    }
    for verdict in result.evidence.verdicts:
        case = Case.parse(verdict.case)
        assert case.group == verdict.group == GROUP
        if name_of(verdict.variant) == "late":
            assert (verdict.outcome == "fail") == isinstance(case.problem.mask, Causal)
        if verdict.outcome == "fail":
            assert verdict.finding is not None
            assert verdict.finding.replay.startswith("python -m verify sanitize --case ")
            assert verdict.case in verdict.finding.replay
            assert INCONCLUSIVE.get(name_of(verdict.variant), "") in verdict.finding.message
            assert verdict.finding.message.startswith("inconclusive") == (
                name_of(verdict.variant) in INCONCLUSIVE
            )
    assert "Invalid __global__ read of size 4 bytes" in result.words
    page = (lane.folder / "out" / "sanitizer.md").read_text()
    assert "| **overruns** | o | caught |" in page
    assert "| **races** | r | not seen, by design |" in page
    assert f"| **{file}@\u200bright** | memcheck | 1 | 1 | 0 |" in page
    assert json.loads((lane.folder / "out" / "sanitizer.json").read_text()) == result.report
    failures = result.report["failures"]
    assert isinstance(failures, list)
    told = {(name_of(one["variant"]), one["tool"], one["outcome"]) for one in failures}
    assert told == {
        ("late", "memcheck", "faulty"),
        ("raises", "", "failed"),
        *((name, "memcheck", "inconclusive") for name in INCONCLUSIVE),
    }
    log = json.loads((lane.folder / "out" / "sanitizer.sarif").read_text())
    assert len(log["runs"][0]["results"]) == len(failures)
    suite = ElementTree.parse(lane.folder / "out" / "sanitizer.junit.xml").getroot()
    assert len(suite.findall("testcase/failure")) == len(failures)


RIGHT = 'VARIANTS = [variant("right", lambda args, out: None)]'
LAUNCHES = """
from types import SimpleNamespace
from verify.cuda.compile import LaunchError, launch

def launches(args, out):
    try:
        launch(SimpleNamespace(entry="flash", sizes=()), (1,), (1,), 0, 1)
    except LaunchError:  # one argument, and no parameter
        pass

VARIANTS = [variant("right", launches)]
"""
WAIVER = Waiver(
    tool="racecheck",
    kind="Precise",
    kernel="x",
    source="",
    reason="once needed",
    evidence="none",
    version="2025.3.1.0",
)


def test_a_clean_case_replays_alone_and_a_dead_exception_fails_a_whole_run(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = lane.file("kernel.py", LAUNCHES)
    monkeypatch.setattr(Request, "complete", True)
    lane.faults = lane.faults[2:]
    dead = lane.run(kernels=(file,), quick=True, tools=("racecheck",), waivers=(WAIVER,))
    assert dead.status == INFRASTRUCTURE
    assert "a dead exception" in dead.words
    assert dead.evidence is not None
    (verdict,) = dead.evidence.verdicts
    assert (verdict.oracle, verdict.outcome) == ("racecheck", "pass")
    (path,) = lane.folder.glob(".verify/runs/*/sanitizer/racecheck/0/launches.jsonl")
    for run in ledger.read(path) or [()]:
        assert [launched.kernel for launched in run] == ["flash"]
        assert re.search(r"/kernel\.py:\d+ in launches$", run[0].frame)
    again = lane.run(case=Case.parse(verdict.case), tools=("racecheck",))
    assert again.status == CLEAN
    assert again.evidence is not None
    assert [(v.case, v.outcome) for v in again.evidence.verdicts] == [(verdict.case, "pass")]


@pytest.mark.parametrize(("mode", "says"), [("asleep", "got clean"), ("broken", "no such option")])
def test_a_tool_that_sees_nothing_ends_the_run_before_it_proves_anything(
    lane: Lane, mode: str, says: str
) -> None:
    (lane.folder / "mode").write_text(mode)
    lane.faults = lane.faults[1:2]
    result = lane.run(kernels=(lane.file("kernel.py", RIGHT),), quick=True, tools=("memcheck",))
    assert result.status == INFRASTRUCTURE
    assert "memcheck on overruns: wanted caught" in result.words
    assert says in result.words
    assert result.evidence is not None
    assert not result.evidence.verdicts


def test_a_twin_that_is_convicted_ends_the_run_too(lane: Lane) -> None:
    lane.faults = (
        PlantedFault(variant="overruns", file=lane.planted, about="said to be right", twin=True),
    )
    result = lane.run(kernels=(lane.planted,), tools=("memcheck",))
    assert result.status == INFRASTRUCTURE
    assert "wanted clean" in result.words


def test_without_a_device_or_a_tool_there_is_one_line_and_no_pass(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verify.cli.sanitize_choice.environment_here", lambda: PLAIN_CPU)
    for wanted, says in (({"environment": None}, "no CUDA device"), ({}, "no compute-sanitizer")):
        if not wanted:
            monkeypatch.setenv("PATH", str(lane.folder))
            monkeypatch.setenv("CUDA_HOME", str(lane.folder))
        for require, status in ((True, INFRASTRUCTURE), (False, CLEAN)):
            result = lane.run(kernels=(lane.planted,), require=require, **wanted)
            assert result.status == status
            assert says in result.words
            assert ("not run" in result.words) != require
            assert result.words.count("\n") == 1


def test_planted_faults_alone_prove_the_tools_and_try_no_kernel(lane: Lane) -> None:
    wanted = {"planted_only": True, "tools": ("memcheck", "racecheck")}
    file = lane.file("kernel.py", RIGHT)
    result = lane.run(kernels=(file,), **wanted)
    assert result.status == CLEAN
    assert result.evidence is not None
    assert not result.evidence.verdicts
    lane.faults = (*lane.faults[:2], replace(lane.faults[2], shows=("nothing says this",)))
    assert lane.run(kernels=(file,), **wanted).status == INFRASTRUCTURE


def test_who_is_unknown_is_not_tried(lane: Lane) -> None:
    assert lane.run(kernels=(lane.planted,), variants=("unknown",)).status == USAGE


def test_no_kernel_is_tried_under_a_tool_that_misses_its_fault(lane: Lane) -> None:
    lane.faults = (*lane.faults[:2], replace(lane.faults[2], shows=("nothing says this",)))
    file = lane.file("kernel.py", RIGHT)
    result = lane.run(kernels=(file,), quick=True, tools=("memcheck", "racecheck"))
    assert result.status == INFRASTRUCTURE
    assert "racecheck missed a planted fault" in result.words
    assert result.evidence is not None
    (verdict,) = result.evidence.verdicts
    assert (verdict.oracle, verdict.outcome) == ("memcheck", "pass")


def raced(environment: Environment, subject: Subject, **_: object) -> Session:
    """A kernel without a barrier, tried with delays."""
    facts = Facts(tool="skew", exit_code=0, summary=None, records=(), results=(), expected_cases=1)
    return Session("skew", subject, Judgement("clean", (NOT_DELAYED,)), 61.0, facts)


def test_delays_need_no_other_tool(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(lane.folder))
    monkeypatch.setenv("CUDA_HOME", str(lane.folder))
    lane.faults = lane.faults[:1]  # the twin
    monkeypatch.setattr("verify.sanitizers.lane.race", raced)
    result = lane.run(kernels=(lane.file("kernel.py", RIGHT),), quick=True, tools=("skew",))
    assert result.status == CLEAN, result.words
    assert result.report["sanitizer"] == "not used"
    assert result.words.count(": 61 s") == 2, (
        "a long process of the twin, and of the kernel, is told"
    )
    assert result.evidence is not None
    assert {(v.oracle, v.outcome) for v in result.evidence.verdicts} == {("skew", "pass")}
    page = next(lane.folder.glob(".verify/runs/*/sanitizer.md")).read_text()
    assert "clean; no barrier of it is known here" in page


ASSERTS = """
import os, sys

def wrong(args, out):  # as a kernel of triton's that ConSan stops
    if os.environ.get("TRITON_INSTRUMENTATION_MODE") == "consan":
        where = "/k.py:7: flash: block: [0,0,0], thread: [1,0,0] Assertion `"
        print(where + "Buffer being accessed has outstanding writes` failed.", file=sys.stderr)
        raise RuntimeError("CUDA error: device-side assert triggered")

VARIANTS = [
    variant("right", lambda args, out: None),
    variant("wrong", wrong),
]
"""


@pytest.mark.for_ci
@pytest.mark.long(12)
def test_consan_needs_no_other_tool_and_judges_kernels_that_triton_compiles(lane: Lane) -> None:
    planted = lane.file("planted_triton.py", ASSERTS)
    lane.faults = (
        PlantedFault(variant="right", file=planted, about="r", twin=True, by_triton=True),
        PlantedFault(
            variant="wrong",
            file=planted,
            about="w",
            caught_by=("consan",),
            shows=("outstanding writes",),
            by_triton=True,
        ),
    )
    files = (lane.file("kernel.py", ASSERTS), lane.file("other.py", RIGHT))
    result = lane.run(kernels=files, quick=True, tools=("consan",))
    assert result.status == FAILED
    assert result.evidence is not None
    verdicts = {name_of(v.variant): v for v in result.evidence.verdicts}
    assert {name: v.outcome for name, v in verdicts.items()} == {"right": "pass", "wrong": "fail"}
    finding = verdicts["wrong"].finding
    assert finding is not None
    assert finding.message.startswith("Race: Buffer being accessed has outstanding writes (Triton")
    assert "/k.py:7" in finding.where
    left = result.report["not_run"]
    assert isinstance(left, list)
    assert [one["reason"] for one in left] == ["consan instruments what Triton compiles"]
