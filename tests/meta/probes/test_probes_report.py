"""The report of the probes, and `verify probe`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.harness.fake_campaign import DEVICE, evidence
from verify.cell.discovery import Roster, Unloadable
from verify.cell.process import PLAIN_CPU
from verify.cli import app
from verify.cli import probe as command
from verify.document import terminal
from verify.machine import device
from verify.probes import page
from verify.probes.report import (
    Agreement,
    FunctionProbe,
    MatrixProbe,
    Mismatch,
    OrderProbe,
    ProbeNotRun,
    ProbeReport,
    Quantity,
    Worst,
    as_data,
    read,
    write,
)
from verify.report import build, dumps
from verify.report import read as read_accuracy
from verify.report import write as write_accuracy

GOOD = Quantity("fraction bits F", "25", "25")
AGREED = Agreement(1 << 20, 0, 0, {})
MISMATCH = Mismatch("near 1", ("3c00",) * 16, ("0001",) * 16, "00000000", "3f800000", "3f800001")
MATRIX = MatrixProbe(
    "mma.sync m16n8k16 f16 into f32", "the table", structure=(GOOD,), specials=(), agreement=AGREED
)
WORST = Worst(1.5, "3f800001")
FUNCTION = FunctionProbe(
    "ex2.approx.f32", "PTX ISA", 1 << 32, True, WORST, 1.5, WORST, WORST, Worst(0.6, "3f800001")
)
REPORT = ProbeReport(
    DEVICE,
    "sm_90a",
    (MATRIX,),
    (FUNCTION,),
    (
        OrderProbe(
            "torch-flash",
            "default",
            "bfloat16",
            256,
            "chain of 16 fused groups of 16",
            ("0-15",),
            2,
        ),
    ),
    (ProbeNotRun("wgmma m64n8k16 f16 into f32", "only sm_90a has wgmma"),),
)
WRONG: dict[str, dict[str, Any]] = {
    "structure": {"matrix": (replace(MATRIX, structure=(GOOD, replace(GOOD, measured="24"))),)},
    "special": {
        "matrix": (replace(MATRIX, specials=(Quantity("inf 0", "7fffffff", "7fc00000"),)),)
    },
    "bits": {
        "matrix": (
            replace(
                MATRIX,
                agreement=replace(AGREED, mismatches=3, by_kind={"near 1": 3}, first=MISMATCH),
            ),
        )
    },
    "bound": {"functions": (replace(FUNCTION, ratio=Worst(1.25, "3f800001")),)},
    "NaN": {"functions": (replace(FUNCTION, wrong="a NaN"),)},
}


def test_a_report_survives_its_json(tmp_path: Path) -> None:
    for report in (REPORT, *(replace(REPORT, **changes) for changes in WRONG.values())):
        paths = write(report, tmp_path, page.markdown(report))
        assert read(paths[0]) == report
        data = json.loads(paths[0].read_text(encoding="utf-8"))
        assert data["agrees"] is report.agrees
        assert data["matrix"][0]["agrees"] is report.matrix[0].agrees
    assert as_data(REPORT)["matrix"][0]["structure"][0]["agrees"] is True


@pytest.mark.parametrize("name", WRONG)
def test_every_disagreement_is_red_and_marked(name: str) -> None:
    report = replace(REPORT, **WRONG[name])
    assert REPORT.agrees
    assert not report.agrees
    assert not list(page.details(REPORT))
    assert len(list(page.details(report))) == 1
    assert "❌" not in page.markdown(REPORT)
    assert "❌ **DISAGREES**" in page.markdown(report)
    styles = [
        str(cell.spans)
        for title, table in page.titled(report)
        for column in terminal.render(table, title).columns
        for cell in column.cells
    ]
    assert "bold red" in "".join(styles)
    if name == "bits":
        assert "device 3f800000, model 3f800001" in page.markdown(report)


def test_what_failed_is_no_agreement() -> None:
    report = replace(REPORT, matrix=(MatrixProbe("mma.sync", error="CompileError: no"),))
    assert report.agrees
    assert report.failed == ("mma.sync",)
    assert "CompileError: no" in page.markdown(report)


def test_without_a_gpu_every_probe_is_listed_as_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "environment", lambda: PLAIN_CPU)
    monkeypatch.setattr(
        command, "roster", lambda files: Roster((), (Unloadable("mine.py", "mine.py", "no"),))
    )
    result = CliRunner().invoke(
        app, ["probe", "--out", str(tmp_path), "--json"], standalone_mode=False
    )
    assert (result.exception, result.return_value) == (None, 0)
    (path,) = tmp_path.glob("*/probes.json")
    report = read(path)
    named = [entry.name for entry in report.not_run if entry.reason == "no GPU"]
    offered = (*command.CONFORMING, *command.INSTRUCTIONS, *command.FUNCTIONS)
    assert named == [one.name for one in offered]
    assert len(set(named)) == len(named)
    assert report.not_run[-1] == ProbeNotRun("summation order of mine.py", "does not load")
    assert json.loads(result.stdout)["agrees"] is True
    assert "Not run, " in path.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("report", "status"),
    [(REPORT, 0), (replace(REPORT, **WRONG["bits"]), 1)],
    ids=["agrees", "disagrees"],
)
def test_exit_codes(
    report: ProbeReport,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # so that no committed report is written again with these probes
    monkeypatch.setattr(command, "measure", lambda request, console: report)
    assert CliRunner().invoke(app, ["probe"], standalone_mode=False).return_value == status
    failed = replace(report, functions=(replace(FUNCTION, error="no"),))
    monkeypatch.setattr(command, "measure", lambda request, console: failed)
    assert CliRunner().invoke(app, ["probe"], standalone_mode=False).return_value == (status or 3)


def probed(report: ProbeReport, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """The output of `verify probe` if it measures that report."""

    def measure(request: command.Request, console: object) -> ProbeReport:
        write(report, request.folder, page.markdown(report))
        return report

    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(device, "slug", lambda: "a-device")
    return CliRunner().invoke(app, ["probe", *words], standalone_mode=False).output


@pytest.mark.parametrize(
    ("words", "folders"),
    [
        ((), {".verify/report"}),
        (("--out", "there"), {"there"}),
        (("--publish",), {".verify/report", "reports"}),
        (("--publish", "--out", "there"), {".verify/report", "there"}),
    ],
)
def test_probes_go_among_tracked_files_if_that_is_asked_for(
    words: tuple[str, ...], folders: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = probed(REPORT, monkeypatch, *words)
    pages = {path.parent for path in tmp_path.glob("**/probes.md")}
    assert pages == {path.parent for path in tmp_path.glob("**/probes.json")}
    assert pages == {tmp_path / folder / "a-device" for folder in folders}
    assert all(f"{folder}/a-device/probes.md" in said for folder in folders)


@pytest.mark.for_ci
def test_a_published_report_shows_the_probes_that_are_published(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    accuracy = build(evidence(cases=2))
    folder = tmp_path / "reports" / "a-device"
    write_accuracy(accuracy, folder)
    wrong = replace(REPORT, **WRONG["bits"], device=accuracy["device"])
    probed(wrong, monkeypatch)
    assert dumps(read_accuracy(folder)) == dumps(accuracy)
    probed(wrong, monkeypatch, "--publish")
    (beside,) = read_accuracy(folder)["beside"]
    assert (beside["name"], beside["status"]) == ("probes", "red")


def test_what_would_be_less_than_what_lies_there_is_not_published(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    failed = replace(REPORT, functions=(replace(FUNCTION, error="no"),))
    said = probed(failed, monkeypatch, "--publish")
    assert f"not published, since probes failed: {FUNCTION.name}" in said
    (tmp_path / "mine.py").touch()
    done = CliRunner().invoke(app, ["probe", "--publish", "mine.py"], standalone_mode=False)
    assert "name no KERNELS" in str(done.exception)
    assert not Path("reports").exists()
