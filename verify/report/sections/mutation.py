"""Mutation score: how many small changes of each kernel's source the suite convicts."""

from __future__ import annotations

from verify.document import Number, Paragraph, Row, Section, Span, Table, text
from verify.report.beside import Beside
from verify.report.campaign_schema import MutationReport
from verify.report.schema import Report

ORDER = 66
_COLUMNS = ("variant", "score", "convicted / not equivalent", "judged", "chosen")
_NOTE = (
    "Mutants are copies of a kernel's source with one small change each, such as < for <=, a lost"
    " factor or a lost barrier. Score: the convicted ones of those that are not equivalent, without"
    " a GPU, before this campaign and with the same source. Variants of shared sources share their"
    " mutants. docs/mutation.md lists every survivor with its reason."
)


def section(report: Report, beside: Beside) -> Section | None:
    """One row per variant with a score."""
    rows = tuple(_row(one) for one in report.get("mutation", []) if one["counted"])
    if not rows:
        return None
    return Section("Mutation score", "mutation", (Table(_COLUMNS, rows), Paragraph(_NOTE, True)))


def _row(one: MutationReport) -> Row:
    killed, counted = one["killed"], one["counted"]
    rate = killed / counted
    return (
        Span(one["variant"], "strong"),
        Number(rate, f"{100 * rate:.1f} %"),
        Number(rate, f"{text.count(killed)} / {text.count(counted)}"),
        Number(one["judged"], text.count(one["judged"])),
        Number(one["chosen"], text.count(one["chosen"])),
    )
