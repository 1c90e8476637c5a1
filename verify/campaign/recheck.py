"""Recheck: computes a report's worst cases again from their ids, and checks a report's pages.

It needs no GPU and runs no kernel.  For O and LSE it computes the fp64 reference and the bound, for
dQ, dK and dV only the reference gradient: the bound of a gradient depends on the O and LSE that the
kernel saved, which a report does not hold.  If a report was made with bounds of another model
(`verify.tolerance.MODEL`), its errors must be within today's bounds instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from references.attention import backward, query_gradient
from verify.cell.discovery import roster
from verify.judging.truth import compute_truth
from verify.problem import Problem
from verify.problem.case import Case
from verify.problem.inputs import dequantised, dout, tensors
from verify.report import Report, WorstCase, worst_cases
from verify.report.pages import disagreements
from verify.tolerance import MODEL
from verify.tolerance.forward import resolve
from verify.variant import Config, Numerics
from verify.variant.numerics import rebuilt

# Relative.  Machines add fp64 numbers in different orders; a bound is a smooth function of sums.
_AGREEMENT = 1e-9
_FORWARD = ("out", "lse")
_LARGEST = 1 << 34  # products or elements: a hundred times the largest worst case of a report


@dataclass(frozen=True)
class Recheck:
    """The result for one report.

    cases: worst cases computed again, one per tensor.  disagreeing: a text for each that disagrees.
    stale: variants whose source has changed since.  contradicting: texts about files of the
    report's folder that contradict each other.
    """

    path: Path
    cases: int
    disagreeing: tuple[str, ...]
    stale: tuple[str, ...]
    contradicting: tuple[str, ...] = ()


def recheck(reports: Sequence[tuple[Path, Report]]) -> list[Recheck]:
    """Recheck these reports; each is given with the path of its report.json."""
    now = {declaration.ref: declaration.source_hash for declaration in roster().declarations}
    rechecks = []
    for path, report in reports:
        stale = [v["ref"] for v in report["variants"] if now.get(v["ref"]) != v["source_hash"]]
        cases, disagreeing = recheck_report(report)
        rechecks.append(
            Recheck(
                path, cases, disagreeing, tuple(stale), tuple(disagreements(report, path.parent))
            )
        )
    return rechecks


def recheck_report(report: Report) -> tuple[int, tuple[str, ...]]:
    """The number of a report's worst cases that name an element, and a text for each
    disagreement."""
    arch, today = _arch(report), report["versions"].get("bounds") == MODEL
    located = [
        (v["numerics"], worst) for v, worst in worst_cases(report) if worst["index"] is not None
    ]
    disagreeing: list[str] = []
    # One computation of a case serves all its tensors.
    for (case, forward), group in groupby(
        located, key=lambda pair: (pair[1]["case"], pair[1]["tensor"] in _FORWARD)
    ):
        pairs = list(group)
        worst = [one for _, one in pairs]
        try:
            disagreeing += (
                _forward(pairs[0][0], worst, arch, today) if forward else _gradients(worst)
            )
        except (ValueError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
            # The case, the element or the declaration no longer exists, or the text is malformed.
            disagreeing.append(f"{case}: {' '.join(str(error).split())}")
    return len(located), tuple(disagreeing)


def _arch(report: Report) -> str:
    capability = report["device"].get("capability")
    return f"sm_{str(capability).replace('.', '')}" if capability else "cpu"


def _forward(
    numerics: dict[str, Any], worst: list[WorstCase], arch: str, today: bool
) -> Iterator[str]:
    """Texts where today's reference or bound of O or LSE differs from the report's, at the worst
    elements of one case; under bounds of another model, where the report's error exceeds today's.

    today: whether the report's bounds are of today's model.
    """
    problem = _problem(worst[0])
    config = Config.parse(worst[0]["config"])
    arithmetic = resolve(rebuilt(Numerics, numerics), config, problem, arch)
    truth = compute_truth(problem, dequantised(problem, tensors(problem)), [arithmetic])
    for one in worst:
        reference, bound = {
            "out": (truth.out, truth.out_bound),
            "lse": (truth.lse, truth.lse_bound),
        }[one["tensor"]]
        assert one["index"] is not None
        at = one["index"]
        limit = float(bound.flatten()[at])
        yield from _disagreement(
            one, "reference", float(reference.flatten()[at]), one["reference"], limit
        )
        if today:
            yield from _disagreement(one, "bound", limit, one["bound"], limit)
        else:
            yield from _beyond(one, limit)


def _beyond(worst: WorstCase, bound: float) -> Iterator[str]:
    """A text if the error that the report tells of exceeds that bound."""
    error = worst["r"] * worst["bound"] if worst["bound"] is not None else math.nan
    if error > bound * (1 + _AGREEMENT):
        place = f"error of {worst['tensor']}, element {worst['index']},"
        yield f"{worst['case']}: {place} is {error!r}, today's bound is {bound!r}"


def _problem(worst: WorstCase) -> Problem:
    """The problem of a case.  Raises ValueError if it is too large to have been judged, and would
    take all memory."""
    problem = Case.parse(worst["case"]).problem
    sizes = [math.prod(shape) for shape in problem.shapes.values()]
    if max([problem.pairs * (problem.head_dim + problem.head_dim_v), *sizes]) > _LARGEST:
        raise ValueError("is larger than any case that is judged")
    return problem


def _gradients(worst: list[WorstCase]) -> Iterator[str]:
    """Texts where today's reference gradient differs from the report's, at the worst elements of
    one case."""
    problem = _problem(worst[0])
    inputs = (*dequantised(problem, tensors(problem)), dout(problem))
    for one in worst:
        assert one["index"] is not None
        value = _gradient(problem, inputs, one["tensor"], one["index"])
        yield from _disagreement(one, "reference", value, one["reference"], one["bound"] or 0.0)


def _gradient(
    problem: Problem, inputs: tuple[Tensor, Tensor, Tensor, Tensor], tensor: str, index: int
) -> float:
    """One element of dQ, dK or dV; only its row is computed.

    inputs: q, k, v and dO.  index: flat index in the tensor's logical shape (batch, heads, seqlen,
    head_dim).  Raises IndexError if there is no such element.
    """
    shape = {"dq": problem.shape_q, "dk": problem.shape_k, "dv": problem.shape_v}[tensor]
    if not 0 <= index < math.prod(shape):
        raise IndexError(f"{tensor} has no element {index}")
    rows, dim = shape[2:]
    row = slice(index // dim % rows, index // dim % rows + 1)
    attention = problem.attention
    q, k, v, upstream = inputs
    if tensor == "dq":
        gradient = query_gradient(q, k, v, upstream, attention, rows=row)
    else:
        gradient = getattr(backward(q, k, v, upstream, attention, columns=row), tensor)
    return float(gradient.flatten()[index // (rows * dim) * dim + index % dim])


def _disagreement(
    worst: WorstCase, name: str, value: float, before: float | None, bound: float
) -> Iterator[str]:
    same = before is not None and (value == before or (math.isnan(value) and math.isnan(before)))
    size = max(abs(value), bound)
    if not same and (before is None or not abs(value - before) <= _AGREEMENT * size):
        place = f"{name} of {worst['tensor']}, element {worst['index']},"
        yield f"{worst['case']}: {place} is {value!r}, the report says {before!r}"
