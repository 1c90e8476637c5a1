"""Reports are rendered, compared and refused without torch, whose import takes a second."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.fake_campaign import evidence
from tests.meta.probes.test_probes_report import REPORT as PROBES
from verify.bundle import ROOT
from verify.probes import page
from verify.probes.report import write as write_probes
from verify.report import build, plots, write

COMMANDS = """
import sys
from verify.cli import main
for words in (
    ["report", "--render", "{folder}"],
    ["compare", "{folder}", "{folder}"],
    ["report", "--schema", "{folder}/schemas"],
    ["recheck", "{empty}"],
    ["recheck", "{broken}"],
    ["report", "--render", "{broken}"],
):
    sys.argv = ["verify", *words]
    print(words, main())
    if "torch" in sys.modules:
        sys.exit(" ".join(words) + " imports torch")
"""


def test_reports_are_rendered_and_refused_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With probes beside the report, whose page is rendered too."""
    monkeypatch.setattr(plots, "ratio_plot", lambda report: None)  # the commands draw them
    monkeypatch.setattr(plots, "error_plot", lambda variant, key: None)
    empty, folder, broken = (tmp_path / name for name in ("empty", "device", "broken"))
    for each in (empty, broken):
        each.mkdir()
    (broken / "report.json").write_text('{"schema": 1}', encoding="utf-8")
    write_probes(PROBES, folder, page.markdown(PROBES))
    (folder / "probes.md").unlink()
    write(build(evidence(8)), folder)
    (folder / "report.md").unlink()
    (folder / "probes.md").unlink()

    script = COMMANDS.format(empty=empty, folder=folder, broken=broken)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    for name in ("report.md", "probes.md", "schemas"):
        assert (folder / name).exists(), done.stdout
    assert "holds no report" in done.stdout
