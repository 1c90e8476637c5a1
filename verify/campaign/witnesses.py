"""Witnesses of the collection: the worst cases of published reports, written into kernel files."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from verify.cell.discovery import roster
from verify.report import Report, read, worst_cases
from verify.variant.witness import MOST, Witness, with_witnesses


def published(folder: Path) -> dict[str, tuple[Witness, ...]]:
    """By variant, the case with the largest r of each device whose report is in `folder`, the
    largest first and no more than MOST; raises ReportError."""
    reports = [read(path.parent) for path in sorted(folder.glob("*/report.json"))]
    found: dict[str, list[Witness]] = {}
    for report in reports:
        for ref, witness in _worst(report).items():
            found.setdefault(ref, []).append(witness)
    return {
        ref: tuple(sorted(each, key=lambda one: -one.r)[:MOST])
        for ref, each in sorted(found.items())
    }


def write(found: dict[str, tuple[Witness, ...]]) -> list[Path]:
    """End each kernel file of the collection with the witnesses of its variants; the files that
    have changed."""
    files: dict[str, list[str]] = {}
    for declaration in roster().declarations:
        files.setdefault(declaration.path, []).append(declaration.ref)
    changed = []
    for path, refs in files.items():
        before = Path(path).read_text(encoding="utf-8")
        after = with_witnesses(before, tuple(one for ref in refs for one in found.get(ref, ())))
        if after != before:
            Path(path).write_text(after, encoding="utf-8")
            changed.append(Path(path))
    return changed


def _worst(report: Report) -> dict[str, Witness]:
    """Of each variant the case with the largest r that is a number."""
    day = "".join(filter(str.isdigit, report["started"]))
    found: dict[str, Witness] = {}
    for variant, worst in worst_cases(report):
        kept = found.get(variant["ref"])
        if math.isfinite(worst["r"]) and (kept is None or worst["r"] > kept.r):
            found[variant["ref"]] = Witness(
                case=worst["case"],
                tensor=worst["tensor"],
                r=float(f"{worst['r']:.3g}"),
                device=str(report["device"]["name"]),
                date=f"{day[:4]}-{day[4:6]}-{day[6:8]}",
            )
    return found


def lines(found: dict[str, tuple[Witness, ...]]) -> Iterable[str]:
    """One line for each witness."""
    for ref, each in found.items():
        for one in each:
            yield f"{ref}: {one.tensor}, r = {one.r:.3g} on {one.device}, {one.date}: {one.case}"
