"""Tightness: how near the kernels' worst cases come to their bounds.  Bounds that nothing
approaches would catch little."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from verify.document import Number, Paragraph, Row, Section, Table, ratio
from verify.report import words
from verify.report.beside import Beside
from verify.report.schema import TENSORS, Report

ORDER = 60
_COLUMNS = ("tensor", "inputs", "dtypes", "median of worst r", "least", "largest")
_NOTE = (
    "Each variant and dtype counts once, by the worst r of its cases. fp32 stands apart: its bounds"
    " allow for any order of summation, which makes most of them, and no kernel meets the worst"
    " one."
)


def section(report: Report, beside: Beside) -> Section | None:
    """One row per tensor and kind of inputs."""
    rows = tuple(_row(one) for one in tightness(report))
    if not rows:
        return None
    blocks = (Table(_COLUMNS, rows), Paragraph(_NOTE, note=True))
    return Section("Tightness of the bounds", "tightness", blocks)


class Tight(NamedTuple):
    """One tensor over the variants and dtypes of one kind of inputs: how many, and their worst
    r."""

    tensor: str
    inputs: str
    dtypes: int
    median: float
    least: float
    largest: float


def tightness(report: Report) -> list[Tight]:
    """By tensor, for inputs of 8 and 16 bits and for fp32; nothing of what was not judged."""
    return list(_rows(report))


def _rows(report: Report) -> Iterator[Tight]:
    for tensor in TENSORS:
        for inputs, wide in (("8 and 16 bits", False), ("fp32", True)):
            worst = [
                d["tensors"][tensor]["worst"]["r"]
                for variant in report["variants"]
                for d in variant["dtypes"]
                if tensor in d["tensors"] and (d["dtype"] in ("float32", "float64")) == wide
            ]
            if worst:
                yield Tight(tensor, inputs, len(worst), median(worst), min(worst), max(worst))


def _row(one: Tight) -> Row:
    ratios = (ratio(r) for r in (one.median, one.least, one.largest))
    return words.TENSORS[one.tensor], one.inputs, Number(one.dtypes), *ratios
