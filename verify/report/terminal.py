"""The report as a terminal shows it: one line per variant and dtype, then what is claimed, and what is not judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from verify.report import text
from verify.report.outcome import incomplete, news
from verify.report.schema import DTypeReport, Report, VariantReport
from verify.report.states import GRAVE, claims, gradients, states
from verify.report.statistics import badness
from verify.report.tables import grouped

_MEASURES = (("out",), ("lse",), ("dq", "dk", "dv"))
_COLUMNS = ("r of O", "r of LSE", "r of gradients", "bound / best", "verdict")
_STYLES = {"holds": "green", "wrong": "bold red", "known defect": "yellow", "incomplete": "yellow", "not run": "dim"}


def summary(report: Report) -> RenderableType:
    """Cases and failing cases of the counted phases, worst r and verdict of every dtype of a variant that was judged.

    Under the table: claims of every variant with its states, gradients that were not judged, what is incomplete.
    """
    table = Table(Column("variant", overflow="fold"), "dtype", "cases", "failing", *_COLUMNS)
    judged = [variant for variant in report["variants"] if variant["cases"] or variant["failing"]]
    for variant in judged:
        for dtype in variant["dtypes"]:
            table.add_row(*_row(variant, dtype))
    return Group(table, *_claims(judged), *_unjudged(judged), *_incomplete(report))


def _row(variant: VariantReport, dtype: DTypeReport) -> Sequence[Text]:
    word = verdict(variant, dtype)
    marks = dict.fromkeys(state.name for state in states(variant) if state.name in GRAVE)
    spread = dtype["bound_ratio"]
    cells = [variant["ref"], dtype["dtype"], str(dtype["cases"]), str(dtype["failures"])]
    cells += [_worst(variant, dtype, names) for names in _MEASURES]
    cells.append(text.number(spread["median"] if spread else None))
    return [*(Text(text.one_line(cell)) for cell in cells), _verdict(word, list(marks))]


def _verdict(word: str, marks: Sequence[str]) -> Text:
    return Text(", ".join([word, *marks]), style="bold yellow" if marks and word == "holds" else _STYLES[word])


def verdict(variant: VariantReport, dtype: DTypeReport) -> str:
    """What a dtype is called: a key of _STYLES."""
    if dtype["status"] == "red":
        return "wrong" if news(variant) else "known defect"
    if dtype["status"] == "grey":
        return "incomplete" if dtype["cases"] else "not run"
    return "holds"


def _worst(variant: VariantReport, dtype: DTypeReport, names: Sequence[str]) -> str:
    found = [dtype["tensors"][name]["worst"]["r"] for name in names if name in dtype["tensors"]]
    if found:
        return text.ratio(max(found, key=badness))
    return "not judged" if "dq" in names and gradients(variant) else text.NONE


def _claims(judged: Sequence[VariantReport]) -> Iterator[Text]:
    for variant in judged:
        line = Text(f"{text.one_line(variant['ref'])} claims {claims(variant)}", style="dim")
        yield line
        for state in states(variant):
            style = "bold yellow" if state.name in GRAVE else "dim"
            yield Text(f"  {text.one_line(state)}", style=style)


def _unjudged(judged: Sequence[VariantReport]) -> Iterator[Text]:
    reasons = [(variant["ref"], gradients(variant)) for variant in judged]
    for reason, refs in grouped(pair for pair in reasons if pair[1]):
        yield Text(f"gradients: not judged ({reason}): {text.one_line(', '.join(refs))}")


def _incomplete(report: Report) -> Iterator[Text]:
    for name, why in incomplete(report):
        yield Text(f"incomplete: {text.one_line(f'{name}: {why}' if name else why)}", style="yellow")
