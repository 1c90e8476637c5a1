"""Files that compute-sanitizer left in runs on an H100, read by the lane from the parser to SARIF.

data/VERSION/TOOL/FAULT holds what that version left of one planted kernel, under the lane's own
names.  Folders of the machine are renamed in them; files above 30 kB are kept whole, as .xz.  The
exit code and the answers of the kernel process are in no file: the tests supply those that agree.
"""

from __future__ import annotations

import lzma
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from verify.problem import Problem
from verify.problem.case import Case
from verify.sanitizers.exceptions import Waiver
from verify.sanitizers.exports import junit, sarif
from verify.sanitizers.facts import CaseResult, Facts, collect, judge
from verify.sanitizers.failures import MOST, failures
from verify.sanitizers.fault import PlantedFault
from verify.sanitizers.lane import PlantedSession, TriedSubject
from verify.sanitizers.planted import FAULTS
from verify.sanitizers.report import LaneRun, told
from verify.sanitizers.session import Session, Subject
from verify.sanitizers.tool import ERROR_EXIT, LEDGER, PRINT_LIMIT, TOOLS
from verify.variant import Config, Contract, Declaration, Numerics, Support

VERSION = "2025.3.1.0"
DATA = Path(__file__).with_name("data") / VERSION
BY_NAME = {fault.variant: fault for fault in FAULTS}
CONFIG = Config(block_m=64, block_n=64)

# (tool, planted kernel) -> number of records of each kind and level, and what the summary counts.
SHOWN = {
    ("memcheck", "planted-overrun"): ({"Precise Error": 1}, 1),
    ("memcheck", "planted-overread"): ({"Precise Error": 1}, 1),
    ("memcheck", "planted-shared-overrun"): ({"Precise Error": 200}, 16256),
    ("memcheck", "planted-misaligned-load"): ({"Precise Error": 200}, 16256),
    ("memcheck", "planted-use-after-free"): ({"Precise Error": 200}, 16240),
    ("memcheck", "planted-share-qkv-overrun"): ({"Precise Error": 4}, 4),
    ("memcheck", "planted-cute-hopper-forward-overrun"): ({"Precise Error": 1}, 1),
    ("racecheck", "planted-missing-barrier"): ({"Analysis Error": 1}, 1),
    ("racecheck", "planted-early-copy-read"): ({"Analysis Error": 1}, 1),
    ("racecheck", "planted-missing-mbarrier-wait"): ({"Analysis Error": 1}, 1),
    ("racecheck", "planted-cute-hopper-forward-missing-barrier"): ({"Analysis Error": 1}, 1),
    ("racecheck", "planted-cute-missing-barrier"): ({"Analysis Error": 4}, 4),
    ("racecheck", "planted-split-q-fp8-missing-barrier"): ({"Analysis Error": 6}, 6),
    ("initcheck", "planted-uninitialised-read"): ({"Initcheck Error": 200}, 16240),
    ("synccheck", "planted-divergent-barrier"): ({"Synccheck Error": 200}, 508),
}
# (tool, planted kernel) -> why nothing was proved.
UNPROVED = {
    ("initcheck", "planted-misaligned-load"): "Target application returned an error",
    ("memcheck", "planted-cute-backward-atomic-overrun"): "no readable ledger",
    ("racecheck", "planted-cute-backward-atomic-early-copy-read"): "before first instrumented API",
}
CLEAN = [(tool, "planted-correct") for tool in TOOLS]
EVERY = [*CLEAN, *SHOWN, *UNPROVED]


def case_of(name: str) -> Case:
    problem = Problem(seqlen_q=203, seqlen_kv=203, head_dim=40, dtype="float32")
    return Case(name, CONFIG.name, "sanitizer", problem)


def facts_of(tool: str, name: str, folder: Path) -> Facts:
    """The facts about a process that left the recorded files."""
    for path in (DATA / tool / name).iterdir():
        kept = path.read_bytes()
        whole = lzma.decompress(kept) if path.suffix == ".xz" else kept
        (folder / path.name.removesuffix(".xz")).write_bytes(whole)
    facts = collect(tool, folder, 0, (CaseResult(case_of(name).id, "ok"),), 1)
    errors = facts.summary is not None and facts.summary.errors
    return replace(facts, counted=True, exit_code=ERROR_EXIT if errors else 0)


def session_of(tool: str, name: str, folder: Path) -> Session:
    declaration = Declaration(
        ref=name,
        path="planted.py",
        source_hash="",
        name=name,
        family="planted",
        configs=(CONFIG,),
        support=Support(dtypes=("float32",), head_dims=range(8, 41)),
        numerics=Numerics(),
        contract=Contract(),
        head_dim_buckets=(64,),
    )
    facts = facts_of(tool, name, folder)
    subject = Subject(declaration, CONFIG, "float32", (case_of(name),))
    return Session(tool, subject, judge(facts), 1.0, facts)


def test_every_kept_file_is_read_by_a_test() -> None:
    kept = {(path.parent.name, path.name) for path in DATA.glob("*/*")}
    assert kept == set(EVERY)
    assert {tool for tool, _ in SHOWN} == set(TOOLS)
    texts = (path.read_text() for path in DATA.rglob("*.*") if path.suffix != ".xz")
    folders = {place for text in texts for place in re.findall(r"(?<![\w./<])/[a-z]\w*/", text)}
    assert folders <= {"/src/", "/cache/", "/cutlass/"}


@pytest.mark.parametrize(("tool", "name"), CLEAN)
def test_a_clean_process_is_clean_by_five_facts(tool: str, name: str, tmp_path: Path) -> None:
    facts = facts_of(tool, name, tmp_path)
    assert judge(facts).outcome == "clean"
    (run,) = facts.launches or ()
    assert [launched.kernel for launched in run] == ["planted_correct"]
    (tmp_path / LEDGER).write_text('{"run": true}\n')  # no launch
    unlaunched = collect(tool, tmp_path, 0, facts.results, 1)
    assert judge(replace(unlaunched, counted=True)).outcome == "inconclusive"


@pytest.mark.parametrize(("tool", "name"), SHOWN)
def test_records_and_summary_agree_and_show_the_fault(tool: str, name: str, tmp_path: Path) -> None:
    kinds, total = SHOWN[tool, name]
    facts = facts_of(tool, name, tmp_path)
    judgement = judge(facts)
    assert (judgement.outcome, judgement.total) == ("faulty", total)
    # All doubts are the tool's word that the program failed with its kernel.
    assert judgement.reasons == facts.doubts
    assert Counter(f"{each.kind} {each.level}" for each in judgement.records) == kinds
    for record in judgement.records:
        assert (record.tool, record.unknown) == (tool, ())
        assert all((record.text, record.kernel, record.source))
        assert bool(record.thread and record.block) == (tool != "racecheck")
        assert bool(record.address and record.size) == (tool in {"memcheck", "initcheck"})
        outside = tool == "memcheck" and "__global__" in record.text
        assert bool(record.nearest) == outside
    assert BY_NAME[name].shown_by(judgement) is not None


@pytest.mark.parametrize(("tool", "name"), UNPROVED)
def test_a_process_that_proved_nothing_is_inconclusive(
    tool: str, name: str, tmp_path: Path
) -> None:
    judgement = judge(facts_of(tool, name, tmp_path))
    assert (judgement.outcome, judgement.records) == ("inconclusive", ())
    assert UNPROVED[tool, name] in "; ".join(judgement.reasons)


def test_the_ledger_tells_the_launch_of_a_record(tmp_path: Path) -> None:
    session = session_of("memcheck", "planted-share-qkv-overrun", tmp_path)
    (case,) = session.subject.cases
    found = list(failures(case, session.subject, session, shared=False))
    assert len(found) == 4
    for failure in found:
        assert failure.record is not None
        assert failure.record.kernel.startswith("store_row")  # inlined: the stack has the kernel
        assert failure.frame == "/src/attention/kernels/cuda/family.py:190 in forward"


def waiver(record_kernel: str, source: str, version: str = VERSION) -> Waiver:
    return Waiver(
        tool="racecheck",
        kind="Analysis",
        kernel=f"^{record_kernel}$",
        source=source,
        reason="of a test",
        evidence="of a test",
        version=version,
    )


def test_an_exception_excuses_a_recorded_race_by_the_text_of_its_line(tmp_path: Path) -> None:
    facts = facts_of("racecheck", "planted-missing-barrier", tmp_path)
    (record,) = facts.records or ()
    source = tmp_path / "tiny.cu"
    number = int(record.source.rpartition(":")[2])
    source.write_text("\n" * (number - 1) + "  tile[threadIdx.x] = value;\n")
    files = {path: path.read_text() for path in tmp_path.glob("*.xml")}
    for path, text in files.items():
        path.write_text(text.replace("/src/attention/tests/planted/tiny.cu", str(source)))
    again = collect("racecheck", tmp_path, 0, facts.results, 1)
    again = replace(again, counted=True, exit_code=ERROR_EXIT)
    used = waiver("planted_missing_barrier", r"^tile\[threadIdx\.x\] = value;$")
    judgement = judge(again, (used,))
    assert (judgement.outcome, judgement.waived) == ("clean", (used,))
    for other in (waiver("planted_missing_barrier", "^other"), waiver("planted", "value")):
        assert judge(again, (other,)).outcome == "faulty"


def test_what_was_not_printed_cannot_be_excused(tmp_path: Path) -> None:
    facts = facts_of("initcheck", "planted-uninitialised-read", tmp_path)
    assert len(facts.records or ()) == PRINT_LIMIT
    every = replace(waiver(".*", ""), tool="initcheck", kind="Initcheck")
    judgement = judge(facts, (every,))
    assert judgement.outcome == "inconclusive"
    assert "16040 errors beyond the print limit" in "; ".join(judgement.reasons)


def account_of(folder: Path) -> LaneRun:
    """A run that tried every recorded kernel as one on trial, and the faults as planted ones."""
    planted, tried = [], []
    for tool, name in EVERY:
        where = folder / tool / name
        where.mkdir(parents=True)
        session = session_of(tool, name, where)
        (case,) = session.subject.cases
        fault = BY_NAME[name]
        assert isinstance(fault, PlantedFault)
        planted.append(PlantedSession(fault, session))
        found = tuple(failures(case, session.subject, session, shared=False))
        outcomes = {case.id: session.judgement.outcome}
        tried.append(
            TriedSubject(
                session.subject,
                tool,
                (session,),
                outcomes,
                () if outcomes[case.id] == "clean" else found,
            )
        )
    return LaneRun(
        run="r",
        device={"slug": "nvidia-h100-80gb-hbm3"},
        sanitizer=VERSION,
        tools=TOOLS,
        whole=False,
        planted=tuple(planted),
        tried=tuple(tried),
    )


def test_every_recorded_failure_is_told_in_sarif_and_junit(tmp_path: Path) -> None:
    run = account_of(tmp_path)
    data = told(run)
    shown = sum(min(sum(kinds.values()), MOST) for kinds, _ in SHOWN.values())
    assert len(data["failures"]) == shown + len(UNPROVED)
    (log,) = sarif(data)["runs"]
    assert log["tool"]["driver"]["version"] == VERSION
    assert Counter(result["ruleId"] for result in log["results"]) == Counter(
        "/".join((each["tool"], str((each["record"] or {"kind": "inconclusive"})["kind"])))
        for each in data["failures"]
    )
    located = [result for result in log["results"] if "locations" in result]
    assert len(located) == shown
    for result in located:
        (place,) = result["locations"]
        physical = place["physicalLocation"]
        assert physical["artifactLocation"]["uri"].endswith((".cu", ".cuh", ".hpp"))
        assert physical["region"]["startLine"] > 1
        assert place["logicalLocations"][0]["name"]
        assert result["properties"]["replay"] in result["message"]["text"]
    # The spare copies that nothing proved are uncaught: the run proves nothing.
    assert log["invocations"] == [{"executionSuccessful": False}]
    suite = junit(data)
    assert suite.count("<failure") >= shown + len(UNPROVED)
