"""Tightness: how near the kernels' worst cases come to their bounds.  Bounds that nothing
approaches would catch little."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from verify.report import text
from verify.report.schema import TENSORS, Report

COLUMNS = ("tensor", "inputs", "dtypes", "median of worst r", "least", "largest")
NOTE = (
    "Each variant and dtype counts once, by the worst r of its cases. fp32 stands apart: its bounds"
    " allow for any order of summation, which makes most of them, and no kernel meets the worst"
    " one."
)


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


def rows(report: Report) -> list[list[str]]:
    """The same in words, by COLUMNS."""
    return [
        [text.TENSORS[one.tensor], one.inputs, str(one.dtypes), *map(text.ratio, one[3:])]
        for one in tightness(report)
    ]
