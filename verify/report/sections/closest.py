"""Worst cases: where each variant comes closest to its bound, or is beyond it."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

from verify.document import Figure, Number, Paragraph, Section, Span, Table, ratio, text
from verify.problem.case import Case, CaseError
from verify.report import plots, words
from verify.report.beside import Beside
from verify.report.schema import Report, WorstCase
from verify.report.statistics import badness
from verify.report.tables import ordered

ORDER = 50
PICTURE = "r"
_COLUMNS = ("variant", "dtype", "r", "at", "oracle", "config", "fp64 reference", "bound")
_NOTE = (
    "The largest r of each variant, and the element where it stands. The other dtypes and tensors,"
    " and the commands that run these cases again, are under Variants."
)
_CAPTION = (
    "How much of its bound each case used. Dots: cases, 40 of each row; bar: median of all; large"
    " mark: the worst case. Exact results are drawn at 0."
)


def section(report: Report, beside: Beside) -> Section | None:
    """The plot of r, and one row per variant that has an r."""
    rows = tuple(
        (
            *(Span(one.ref, "strong"), one.dtype, ratio(one.case["r"]), one.where),
            *(one.case["oracle"], Span(one.case["config"], "code")),
            Number(one.case["reference"], text.exact(one.case["reference"])),
            Number(one.case["bound"]),
        )
        for one in closest(report)
    )
    if not rows:
        return None
    picture = Figure(PICTURE, _CAPTION, partial(plots.ratio_plot, report))
    blocks = (Paragraph(_NOTE, note=True), picture, Table(_COLUMNS, rows))
    return Section("Worst cases", "closest", blocks)


class Closest(NamedTuple):
    """The worst r of a variant.  where: the element, in its tensor's logical shape ("O[0, 3, 17,
    5]"), or the tensor alone."""

    ref: str
    dtype: str
    where: str
    case: WorstCase


def closest(report: Report) -> list[Closest]:
    """Of every variant that has an r the case with the largest, in the order of `ordered`."""
    found = []
    for variant in ordered(report):
        cases = [
            (d["dtype"], tensor["worst"])
            for d in variant["dtypes"]
            for tensor in d["tensors"].values()
        ]
        if cases:
            dtype, case = max(cases, key=lambda one: badness(one[1]["r"]))
            found.append(Closest(variant["ref"], dtype, _where(case), case))
    return found


def _where(case: WorstCase) -> str:
    name = words.TENSORS[case["tensor"]]
    try:
        p = Case.parse(case["case"]).problem
    except CaseError:
        return name
    shapes = {
        "out": p.shape_out,
        "lse": p.shape_out[:3],
        "dq": p.shape_q,
        "dk": p.shape_k,
        "dv": p.shape_v,
    }
    shape, flat = shapes[case["tensor"]], case["index"]
    if flat is None or not 0 <= flat < math.prod(shape):
        return name
    place = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        place.append(at)
    return f"{name}[{', '.join(map(str, reversed(place)))}]"
