"""What lies beside a report: probes that disagree are red and so is the report; sanitizers; what is
not run is said."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

from tests.harness.fake_campaign import BINS, DEVICE, evidence
from tests.harness.reports_beside import FAILED, account, green_report, section, written
from tests.meta.probes.test_probes_report import FUNCTION, MATRIX, REPORT, WRONG
from tests.meta.report.test_report_rendering import HOSTILE, Elements
from verify import cli
from verify.campaign import runner
from verify.probes.report import ProbeNotRun
from verify.probes.report import write as write_probes
from verify.report import Report, build, plots, read, write
from verify.report.beside import Beside, look

ENTRIES = {
    "structure": "verify/arithmetic/units.py, sm_90: float16 into float32, mma.sync",
    "special": "verify/arithmetic/units.py, sm_90: float16 into float32, mma.sync",
    "bits": "verify/arithmetic/units.py, sm_90: float16 into float32, mma.sync",
    "bound": "verify/arithmetic/instructions.py: EXP[&quot;ex2.approx&quot;]",
    "NaN": "verify/arithmetic/instructions.py: EXP[&quot;ex2.approx&quot;]",
}
SAID = {
    "structure": (
        '<td><span class="bad">24</span> <span class="soft">table: 25</span>',
        "<td class=bad>24<td>25",
    ),
    "special": ("<td class=bad>7fffffff<td>7fc00000", "table: all of them"),
    "bits": (
        "<td class=bad>3<td>",
        "device 3f800000, model 3f800001",
    ),
    "bound": (
        "<td class=bad>1.25<td>",
        "1.25 at 3f800001 (1)",
    ),
    "NaN": ("<pre>a NaN</pre>", ">DISAGREES<"),
}


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of the time, and say nothing about what lies beside a report."""
    monkeypatch.setattr(plots, "ratio_plot", lambda report: None)
    monkeypatch.setattr(plots, "error_plot", lambda variant, key: None)


WAIVED = ("tool", "kind", "kernel", "words", "source", "reason", "evidence", "version")


@pytest.fixture(scope="module")
def green() -> Report:
    return green_report()


@pytest.mark.parametrize("name", WRONG)
def test_a_disagreement_is_red_and_the_report_with_it(
    name: str, green: Report, tmp_path: Path
) -> None:
    page = written(green, tmp_path, dataclasses.replace(REPORT, **WRONG[name]))
    report = read(tmp_path)
    assert report["status"] == "red"
    ((entry),) = report["beside"]
    assert (entry["name"], entry["status"]) == ("probes", "red")
    assert "1 of 2 probes on sm_90a disagree with the tables" in entry["said"]
    assert '</h1>\n<p><span class="chip red">FAIL</span>' in page
    part = section(page, "probes", "sanitizers")
    assert '<span class="chip red">FAIL</span></h2>' in part
    assert '<span class="chip red">DISAGREES</span>' in part
    assert '<span class="bad">disagrees with the table</span>' in part
    assert f"Entry: <code>{ENTRIES[name]}</code>" in part
    assert all(said in part for said in SAID[name])
    lines = (tmp_path / "report.md").read_text(encoding="utf-8").splitlines()
    assert lines[2].startswith("❌ **FAIL**")
    assert [line for line in lines if line.startswith("Entry: `verify/arithmetic/")]
    assert "**disagrees with the table**" in "\n".join(lines)


def test_agreement_is_green(green: Report, tmp_path: Path) -> None:
    page = written(green, tmp_path, REPORT)
    report = read(tmp_path)
    assert report["status"] == "green"
    assert [entry["status"] for entry in report["beside"]] == ["green"]
    part = section(page, "probes", "sanitizers")
    assert '<span class="chip green">pass</span></h2>' in part
    assert part.count('<span class="chip green">agrees</span>') == 2
    assert "<td class=good>0<" in part
    assert not re.search(r'class="?bad', part)
    for said in (
        ">all 2^32<td>",
        "3f800001 (1)",
        "PTX ISA",
        "chain of 16 fused groups of 16",
        "only sm_90a has wgmma",
    ):
        assert said in part
    assert "nothing disagrees with the tables" in (tmp_path / "report.md").read_text(
        encoding="utf-8"
    )
    assert "❌" not in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_without_probes_they_are_not_run_and_nothing_changes(green: Report, tmp_path: Path) -> None:
    page = written(green, tmp_path)
    assert "beside" not in read(tmp_path)
    assert read(tmp_path)["status"] == "green"
    assert "Not run: no probes.json lies beside this report" in section(
        page, "probes", "sanitizers"
    )
    assert "Not run: no sanitizer.json lies beside this report" in section(
        page, "sanitizers", "builds"
    )
    assert (tmp_path / "report.md").read_text(encoding="utf-8").count("\nNot run: no ") == 2


def test_probes_that_found_no_gpu_are_not_run(green: Report, tmp_path: Path) -> None:
    none = dataclasses.replace(
        REPORT,
        matrix=(),
        functions=(),
        not_run=(ProbeNotRun("wgmma", "no GPU"), ProbeNotRun("expf", "no GPU")),
    )
    part = section(written(green, tmp_path, none), "probes", "sanitizers")
    assert read(tmp_path)["status"] == "green"
    assert "Not run: no instruction and no function was tried." in part
    assert "Not run, 2: no GPU" in part
    assert "wgmma, expf" in part
    assert "chain of 16 fused groups of 16" in part


def test_a_probe_that_failed_keeps_the_report_from_green(green: Report, tmp_path: Path) -> None:
    failed = dataclasses.replace(
        REPORT,
        functions=(FUNCTION, dataclasses.replace(FUNCTION, name="expf", error="CompileError")),
    )
    part = section(written(green, tmp_path, failed), "probes", "sanitizers")
    assert read(tmp_path)["status"] == "grey"
    assert "1 of 3 probes on sm_90a failed: expf" in part
    assert "<pre>CompileError</pre>" in part
    assert not re.search(r'class="?bad', part)


def test_an_instruction_that_no_table_has_is_said_and_no_disagreement(
    green: Report, tmp_path: Path
) -> None:
    unknown = dataclasses.replace(MATRIX, guess=True, structure=(), agreement=None)
    part = section(
        written(green, tmp_path, dataclasses.replace(REPORT, matrix=(unknown,))),
        "probes",
        "sanitizers",
    )
    assert read(tmp_path)["status"] == "green"
    assert "1 are not in the tables." in part
    assert '<span class="chip grey">not in the table</span>' in part


@pytest.mark.parametrize("file", ["probes.json", "sanitizer.json"])
@pytest.mark.parametrize("content", ["{", "[]", '{"device": {"slug": "a"}, "matrix": 1}'])
def test_a_file_that_cannot_be_read_is_named(
    file: str, content: str, green: Report, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(content)
    page = written(green, tmp_path)
    assert read(tmp_path)["status"] == "grey"
    assert f"{file} cannot be read: " in page
    assert f"{file} cannot be read: " in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_a_file_of_another_device_does_not_count(green: Report, tmp_path: Path) -> None:
    other = DEVICE | {"slug": "elsewhere"}
    page = written(
        green,
        tmp_path,
        dataclasses.replace(REPORT, device=other, **WRONG["bits"]),
        account(device=other),
    )
    assert read(tmp_path)["status"] == "grey"
    assert page.count("is of another device: elsewhere") == 4  # above, and in either section
    assert "DISAGREES" not in page


def test_written_again_after_the_table_was_corrected(green: Report, tmp_path: Path) -> None:
    written(green, tmp_path, dataclasses.replace(REPORT, **WRONG["structure"]))
    red = read(tmp_path)
    written(red, tmp_path, REPORT)
    assert read(tmp_path)["status"] == "green"
    (tmp_path / "probes.json").unlink()
    written(red, tmp_path)
    assert (read(tmp_path)["status"], read(tmp_path)["beside"]) == ("green", [])


def test_what_lies_beside_does_not_hide_a_failure(tmp_path: Path) -> None:
    written(build(evidence(6), BINS), tmp_path, REPORT)
    assert read(tmp_path)["status"] == "red"


def test_the_same_bytes_for_the_same_folder(green: Report, tmp_path: Path) -> None:
    pages = [written(green, tmp_path / name, REPORT, account()) for name in "ab"]
    assert pages[0] == pages[1]
    assert written(read(tmp_path / "a"), tmp_path / "a") == pages[0]
    several: Report = {**green, "runs": [{"run": "r", "started": "s", "profile": "p"}]}
    written(several, tmp_path / "a")
    before = (tmp_path / "a" / "report.json").read_bytes()
    written(read(tmp_path / "a"), tmp_path / "a")
    assert (tmp_path / "a" / "report.json").read_bytes() == before


def test_nothing_from_beside_becomes_markup(green: Report, tmp_path: Path) -> None:
    quantity = dataclasses.replace(MATRIX.structure[0], name=HOSTILE, measured=HOSTILE)
    hostile = dataclasses.replace(
        REPORT,
        arch=HOSTILE,
        matrix=(
            dataclasses.replace(
                MATRIX, name=HOSTILE, table=HOSTILE, structure=(quantity,), error=HOSTILE
            ),
        ),
        functions=(
            dataclasses.replace(
                FUNCTION, name=HOSTILE, table=HOSTILE, order=HOSTILE, wrong=HOSTILE
            ),
        ),
        orders=(
            dataclasses.replace(
                REPORT.orders[0], variant=HOSTILE, order=HOSTILE, groups=(HOSTILE,)
            ),
        ),
        not_run=(ProbeNotRun(HOSTILE, HOSTILE),),
    )
    words = account(run=HOSTILE, tools=[HOSTILE], not_run=[{"variant": HOSTILE, "reason": HOSTILE}])
    for one in (*words["planted"], *words["tried"]):
        one |= {"variant": HOSTILE, "tool": HOSTILE, "about": HOSTILE, "outcome": HOSTILE}
    words["tried"][0]["cases"] = {HOSTILE: HOSTILE}
    words["failures"] = [dict.fromkeys(FAILED, HOSTILE) | {"record": {HOSTILE: HOSTILE}}]
    words["waivers"] = [dict.fromkeys(WAIVED, HOSTILE) | {"dead": True}]
    page = written(green, tmp_path, hostile, words)
    tags = Elements(page).tags
    assert [tag for tag, _ in tags].count("script") == 1  # the page's own
    assert not [
        name
        for _, attributes in tags
        for name in attributes
        if name.startswith("on") or name == "src"
    ]
    assert not {"\x1b", "\u202e"} & set(page + (tmp_path / "report.md").read_text(encoding="utf-8"))
    assert "&lt;script&gt;" in section(page, "probes", "sanitizers")
    assert "&lt;script&gt;" in section(page, "sanitizers", "builds")


def test_the_command_writes_the_pages_again(
    green: Report,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(green, tmp_path)
    monkeypatch.setattr(sys, "argv", ["verify", "report", "--render", str(tmp_path)])
    assert cli.main() == runner.CLEAN
    write_probes(dataclasses.replace(REPORT, **WRONG["bits"]), tmp_path, "")
    assert cli.main() == runner.FAILED
    assert "DISAGREES" in (tmp_path / "report.html").read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["verify", "report", "--render", str(tmp_path / "none")])
    assert cli.main() == runner.USAGE
    assert "none' does not exist" in capsys.readouterr().out


def test_older_reports_without_what_lies_beside_are_read(green: Report, tmp_path: Path) -> None:
    write(green, tmp_path)
    assert "beside" not in json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert look(tmp_path, green["device"]) == Beside()
