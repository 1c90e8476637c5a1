"""The real judge judges hostile kernels: each must end as its docstring says."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from verify.campaign.conclusion import publish
from verify.campaign.run import CampaignRun
from verify.campaign.targets import Target
from verify.cell import confinement
from verify.evidence import Evidence, Verdict, load
from verify.evidence.judge_version import judge_changed, judge_hash
from verify.judging import history
from verify.problem import Problem
from verify.report import build
from verify.report.schema import Report
from verify.report.states import states

KERNELS = Path(__file__).parent / "kernels"
NAMES = sorted(path.stem for path in KERNELS.glob("*.py") if path.stem != "hostile_base")
PROBLEM = Problem(heads_q=2, heads_kv=2, seqlen_q=20, seqlen_kv=33, head_dim=16, dtype="float32")
# Bidirectional classes that change the direction of the text after them.
TURNING = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
# Cases of each kernel, on other inputs: some attacks need an earlier case, and whether a process
# grows is seen in three.
TIMES = 2
TIMES_OF_RIGHT = 3

pytestmark = pytest.mark.skipif(
    not confinement.enabled(), reason=f"cells are {confinement.state()}"
)


@dataclass(frozen=True)
class Must:
    """The required end of a kernel, from its docstring.

    fate: "fail", "fail later", "not load" or "pass".  oracles: one of them must convict.  words: a
    part of the finding or the reason.  state: the report's mark.
    """

    fate: str
    oracles: tuple[str, ...]
    words: str
    state: str


def must(name: str) -> Must:
    text = (
        ast.get_docstring(
            ast.parse((KERNELS / f"{name}.py").read_text(encoding="utf-8")), clean=True
        )
        or ""
    )
    match = re.fullmatch(
        r"Must: (fail later|fail|not load|pass)(?: ([a-z_ ]+))?(?:, (\w+))?(?:: (.+))?",
        text.splitlines()[-1],
    )
    assert match is not None, f"{name}: its docstring's last line says not what must happen"
    return Must(match[1], tuple((match[2] or "").split(" or ")), match[4] or "", match[3] or "")


@dataclass
class Outcome:
    """The results of all hostile kernels: their run, verdicts, report and left-over processes."""

    folder: Path
    run: CampaignRun
    verdicts: dict[str, list[Verdict]]
    refused: dict[str, str]
    evidence: Evidence
    report: Report
    orphans: list[int]
    version: str


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    """One judge has judged all hostile kernels in a separate directory."""
    folder, version = tmp_path_factory.mktemp("hostile"), judge_hash()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("VERIFY_DEADLINE", "1.5")
        patch.setattr(history, "_PAUSE", 0.05)  # no other program will free memory
        run = CampaignRun(
            Path(".verify/runs/hostile"), "dev", tuple(KERNELS / f"{name}.py" for name in NAMES)
        )
        verdicts: dict[str, list[Verdict]] = {}
        judge = run.judge("main")
        try:
            for declaration in run.here:
                target = Target(declaration, declaration.configs[0], "float32", "accuracy")
                most = declaration.support.max_seqlen or PROBLEM.seqlen_kv
                problem = PROBLEM.but(
                    seqlen_q=min(PROBLEM.seqlen_q, most), seqlen_kv=min(PROBLEM.seqlen_kv, most)
                )
                name = Path(declaration.path).stem
                times = TIMES_OF_RIGHT if must(name).fate == "pass" else TIMES
                verdicts_of = [judge.judge(target, problem.but(seed=i)) for i in range(times)]
                verdicts[name] = [verdict for each in verdicts_of for verdict in each]
        finally:
            judge.close()
        refused = {Path(failure.path).stem: failure.message for failure in run.roster.failures}
        evidence = load(run.directory)
        yield Outcome(
            folder, run, verdicts, refused, evidence, build(evidence), orphans(folder), version
        )


def orphans(folder: Path) -> list[int]:
    """Processes that hostile kernels left: they have their name, and were started in this
    directory.  Those of another worker can still be running."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            named = (path / "comm").read_text(encoding="utf-8").startswith("hostile")
            if named and (path / "cwd").readlink() == folder.resolve():
                pids.append(int(path.name))
    return pids


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_kernel_ends_as_it_must(name: str, outcome: Outcome) -> None:
    expected = must(name)
    if expected.fate == "not load":
        assert expected.words in outcome.refused.get(name, "it loads")
        return
    assert name not in outcome.refused, outcome.refused[name]
    failing = [verdict for verdict in outcome.verdicts[name] if verdict.outcome == "fail"]
    if expected.fate == "pass":
        assert not failing, failing[0].finding
        (variant,) = (v for v in outcome.report["variants"] if v["path"] == f"{name}.py")
        assert [state.name for state in states(variant)][:1] == (
            [expected.state] if expected.state else []
        )
        return
    by_case = {verdict.case: [v for v in failing if v.case == verdict.case] for verdict in failing}
    assert len(by_case) == TIMES - (expected.fate == "fail later"), "every time"
    for verdicts in by_case.values():
        messages = [
            v.finding.message
            for v in verdicts
            if v.finding is not None and v.oracle in expected.oracles
        ]
        assert messages, f"convicted by {[v.oracle for v in verdicts]} alone"
        assert any(expected.words in message for message in messages), messages


def test_every_kernel_was_judged_or_refused(outcome: Outcome) -> None:
    assert sorted([*outcome.verdicts, *outcome.refused]) == NAMES


def test_nothing_is_left_behind(outcome: Outcome) -> None:
    """No file in the kernels' or the user's directory, no process, no change in the judge."""
    assert not outcome.orphans
    assert {path.name for path in outcome.folder.iterdir()} == {".verify"}
    assert {path.stem for path in KERNELS.iterdir()} - {"__pycache__", "hostile_base"} == set(NAMES)
    assert judge_hash() == outcome.version
    assert judge_changed(outcome.run.evidence()) is None


def test_the_report_is_written_and_can_be_shown(outcome: Outcome, tmp_path: Path) -> None:
    line = publish(outcome.evidence, "hostile", tmp_path, tmp_path / "report")
    written = [
        path for path in (tmp_path / "report").iterdir() if path.suffix in (".json", ".md", ".html")
    ]
    assert len(written) >= 3
    for text in [line, *(path.read_text(encoding="utf-8") for path in written)]:
        hidden = {
            c
            for c in text
            if unicodedata.category(c) in ("Cc", "Cs") or unicodedata.bidirectional(c) in TURNING
        }
        assert not hidden - {"\n", "\t"}
    report = (tmp_path / "report" / "report.json").read_text(encoding="utf-8")
    assert "confined by Landlock" in report
    assert os.path.getsize(tmp_path / "report" / "report.json") > 10_000
