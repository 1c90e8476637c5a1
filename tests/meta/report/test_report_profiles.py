"""profiles.json beside a report: a row for each kernel, what is stale, unreadable or foreign."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.fake_campaign import BINS, evidence
from verify.profiling.metrics import QUANTITIES
from verify.profiling.record import NAME, Profiles
from verify.report import Report, build, plots, write

VALUES: dict[str, float | None] = {quantity.key: 0.0 for quantity in QUANTITIES} | {
    "duration": 550.9e-6,
    "tensor_pipe": 31.12,
    "l2": None,
}
STALLS = {"wait": 0.92, "long_scoreboard": 0.4, "barrier": 0.1}


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of the time, and say nothing about what lies beside a report."""
    monkeypatch.setattr(plots, "ratio_plot", lambda report: None)
    monkeypatch.setattr(plots, "error_plot", lambda variant, key: None)


@pytest.fixture(scope="module")
def report() -> Report:
    return build(evidence(24), BINS)


def record(report: Report, **changes: Any) -> Profiles:
    """A profile of the report's first variant, which starts two kernels."""
    variant = report["variants"][0]
    kernels = [
        {
            "name": name,
            "grid": "8",
            "block": "128",
            "values": values,
            "stalls": STALLS,
            "limits": {},
        }
        for name, values in (("_walk", VALUES), ("_sums", VALUES | {"conflicts_ldsm": 7.0}))
    ]
    profile = {
        "variant": variant["ref"],
        "source_hash": variant["source_hash"],
        "config": "m64",
        "problem": "sq=32,skv=32,d=64",
        "ncu": "2025.3",
        "kernels": kernels,
    }
    found: Any = {"schema": 1, "device": report["device"], "profiles": [profile | changes]}
    return found


def page(report: Report, folder: Path, text: str) -> str:
    (folder / NAME).write_text(text)
    write(report, folder)
    return (folder / "report.md").read_text()


def test_each_kernel_has_a_row(report: Report, tmp_path: Path) -> None:
    shown = page(report, tmp_path, json.dumps(record(report)))
    assert "2 kernels of 1 variant under ncu; 1 with bank conflicts of ldmatrix." in shown
    walk, sums = (line for line in shown.splitlines() if "`_walk`" in line or "`_sums`" in line)
    for said in ("551 µs", "31.1 %", "| – |", "wait 0.92, long_scoreboard 0.40"):
        assert said in walk
    assert "| 7 |" in sums
    assert "| 7 |" not in walk
    assert "another source" not in shown


def test_a_profile_of_another_source_is_marked(report: Report, tmp_path: Path) -> None:
    shown = page(report, tmp_path, json.dumps(record(report, source_hash="older")))
    assert shown.count("another source than this report's") == 2


def test_without_profiles_there_is_no_section(report: Report, tmp_path: Path) -> None:
    write(report, tmp_path)
    assert "under ncu" not in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "profiles.json cannot be read"), ("foreign", "is of another device: another")],
)
def test_what_cannot_be_used_is_said(report: Report, tmp_path: Path, text: str, said: str) -> None:
    if text == "foreign":
        text = json.dumps({**record(report), "device": {"slug": "another"}})
    assert said in page(report, tmp_path, text)
