"""Recheck: compute a report's worst cases again, reference and bound, from their ids alone; needs no GPU and runs no kernel."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verify.case import Case
from verify.discovery import roster
from verify.inputs import tensors
from verify.report import Report, read
from verify.report.schema import WorstCase
from verify.tolerance.forward import resolve
from verify.trial import at_full_shape, compute_truth
from verify.variant import Config, Numerics

# Two machines add fp64 numbers in different orders; a bound is a smooth function of such sums.
_AGREEMENT = 1e-9


@dataclass(frozen=True)
class Recheck:
    """What became of one report: cases computed again, those that disagree, and variants whose source has changed since."""

    path: Path
    cases: int
    disagreeing: tuple[str, ...]
    stale: tuple[str, ...]


def recheck(folder: Path) -> list[Recheck]:
    """Every report.json under a folder; raises `ReportError` for one that does not read."""
    now = {declaration.ref: declaration.source_hash for declaration in roster().declarations}
    found = []
    for path in sorted(folder.glob("*/report.json")):
        report = read(path)
        arch = _arch(report)
        worst = [(variant, d["worst_out"]) for variant in report["variants"] for d in variant["dtypes"]]
        cases = [(variant, case) for variant, case in worst if case is not None and case["index"] is not None]
        disagreeing = [text for variant, case in cases if (text := _disagreement(variant["numerics"], case, arch))]
        stale = [v["ref"] for v in report["variants"] if now.get(v["ref"]) != v["source_hash"]]
        found.append(Recheck(path, len(cases), tuple(disagreeing), tuple(stale)))
    return found


def _arch(report: Report) -> str:
    capability = report["device"].get("capability")
    return f"sm_{str(capability).replace('.', '')}" if capability else "cpu"


def _disagreement(numerics: dict[str, Any], worst: WorstCase, arch: str) -> str:
    """In words, where today's reference or bound differs from the report's; empty if they agree."""
    problem = Case.parse(worst["case"]).problem
    config = Config.parse(worst["config"])
    truth = compute_truth(
        problem, at_full_shape(problem, tensors(problem)), [resolve(Numerics(**numerics), config, problem, arch)]
    )
    assert worst["index"] is not None
    at = int(worst["index"])
    for name, tensor, before in (("reference", truth.out, worst["reference"]), ("bound", truth.out_bound, worst["bound"])):
        value = float(tensor.flatten()[at])
        size = max(abs(value), float(truth.out_bound.flatten()[at]))
        if before is None or abs(value - before) > _AGREEMENT * size:
            return f"{worst['case']}: {name} of element {at} is {value!r}, the report says {before!r}"
    return ""
