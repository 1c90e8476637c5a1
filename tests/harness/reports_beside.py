"""A report with accounts of other commands in its folder: a green one, the account of a sanitizer,
and the page that is written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tests.harness.fake_campaign import BINS, DEVICE, evidence
from verify.probes.report import ProbeReport
from verify.probes.report import write as write_probes
from verify.report import Report, build, write

FAILED: dict[str, Any] = dict.fromkeys(("variant", "config", "dtype", "case", "frame"), "") | {
    "tool": "memcheck",
    "outcome": "faulty",
    "message": "Precise: a write",
    "replay": "verify sanitize",
    "record": {"tool": "memcheck", "kind": "Precise", "kernel": "flash"},
}


def green_report() -> Report:
    """A report in which nothing is wrong."""
    found = evidence(24)
    kept = {
        "variants": tuple(e for e in found.variants if e.ref == "torch-flash"),
        "verdicts": tuple(v for v in found.verdicts if v.variant == "torch-flash"),
    }
    report = build(dataclasses.replace(found, **kept, lost=(), not_run=(), builds=()), BINS)
    assert report["status"] == "green"
    return report


def account(**changes: Any) -> dict[str, Any]:
    """A sanitizer.json in which every planted fault is caught and every kernel is clean."""
    planted = [
        ("planted-correct", "memcheck", "clean", "clean"),
        ("planted-overrun", "memcheck", "caught", "faulty"),
        ("planted-overrun", "racecheck", "any", "clean"),
    ]
    names = ("variant", "tool", "wanted", "outcome")
    told = {"about": "a fault", "holds": True, "reasons": [], "record": None, "seconds": 1.0}
    process = {"cases": 2, "outcome": "clean", "reasons": [], "total": 0}
    process |= {"exit_code": 0, "seconds": 2.5}
    tried = {"variant": "torch-flash", "family": "torch", "source_hash": "0", "config": "default"}
    tried |= {"dtype": "float16", "tool": "memcheck", "outcome": "clean"}
    return {
        "schema": 1,
        "run": "r",
        "device": DEVICE,
        "sanitizer": "2025.3",
        "tools": ["memcheck", "racecheck"],
        "whole": True,
        "seconds": 61.0,
        "planted": [dict(zip(names, one, strict=True)) | told for one in planted],
        "tried": [
            tried | {"cases": {"case one": "clean", "case two": "clean"}, "processes": [process]},
        ],
        "not_run": [{"variant": "torch-math", "reason": "a library's kernel"}],
        "waivers": [],
    } | changes


def written(
    report: Report,
    folder: Path,
    probes: ProbeReport | None = None,
    other: dict[str, Any] | None = None,
) -> str:
    """The page of a report in whose folder these lie."""
    folder.mkdir(exist_ok=True)
    if probes is not None:
        write_probes(probes, folder, "")
    if other is not None:
        (folder / "sanitizer.json").write_text(json.dumps(other), encoding="utf-8")
    return write(report, folder)[2].read_text(encoding="utf-8")


def section(page: str, name: str, after: str) -> str:
    return page[page.index(f'<h2 id="{name}">') : page.index(f'<h2 id="{after}">')]
