"""Reports: evidence condensed, written as JSON, Markdown and one HTML page, read back, and
compared.

report = build(load(run_dir))
write(report, "reports/nvidia-h100-80gb-hbm3")
compare(read("reports/nvidia-h100-80gb-hbm3"), report).regressed
"""

from __future__ import annotations

import os
from pathlib import Path

from verify.report.build import build
from verify.report.compare import Change, ReportComparison, compare, render_comparison
from verify.report.json_file import dumps, parse, read, reports_in
from verify.report.schema import SCHEMA_VERSION, Report, ReportError, WorstCase, worst_cases

__all__ = [
    "SCHEMA_VERSION",
    "Change",
    "Report",
    "ReportComparison",
    "ReportError",
    "WorstCase",
    "build",
    "compare",
    "dumps",
    "parse",
    "read",
    "render_again",
    "render_comparison",
    "reports_in",
    "worst_cases",
    "write",
    "write_index",
]


def write(report: Report, folder: Path | str) -> tuple[Path, Path, Path]:
    """Write report.json, report.md and report.html into a folder; returns their paths in this
    order.

    Probes and sanitizers' accounts that lie in the folder are shown, and count in the status; their
    own pages, probes.md and sanitizer.md, are written again.  Each file is replaced whole: a reader
    sees the old one or the new one.  The plot of r lies beside them as r.svg, for pages that want
    to show it.
    """
    from verify.report import pages

    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    files = pages.render(report, place)
    for name, content in files.items():
        _replace(place / name, content)
    if "r.svg" not in files:
        (place / "r.svg").unlink(missing_ok=True)
    return place / "report.json", place / "report.md", place / "report.html"


def render_again(folder: Path | str) -> None:
    """If a folder holds a report, write it again, so that it shows what lies beside it now."""
    if (Path(folder) / "report.json").is_file():
        write(read(folder), folder)


def write_index(parent: Path | str) -> Path | None:
    """Write index.md over all reports of a folder; returns its path, or None where another page of
    that name lies there, which stays."""
    from verify.report import index

    place = Path(parent)
    if not index.replaceable(place):
        return None
    return _replace(place / index.NAME, index.render(place))


def _replace(path: Path, content: str) -> Path:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    # A lone surrogate from a kernel's words: in JSON its escape is the same text, elsewhere it
    # shows.
    fresh.write_text(content, encoding="utf-8", errors="backslashreplace", newline="\n")
    return fresh.replace(path)
