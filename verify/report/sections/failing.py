"""Failing cases: the smallest of each kind, with the command that runs it again."""

from __future__ import annotations

from collections.abc import Iterator

from verify.document import Block, Boxed, Code, Inline, Paragraph, Section, Span, listed, text
from verify.report import words
from verify.report.beside import Beside
from verify.report.schema import Failure, Report
from verify.report.tables import ordered

ORDER = 40
MESSAGE = 2000  # characters of one message
_NOTE = (
    "The smallest case found for each variant, config and oracle. The last line of each runs the"
    " case again."
)


def section(report: Report, beside: Beside) -> Section | None:
    """One box per kind of failure."""
    failing = [failure for variant in ordered(report) for failure in variant["failing"]]
    if not failing:
        return None
    boxes: list[Block] = [Boxed("red", tuple(_failure(failure))) for failure in failing]
    return Section(
        "Failing cases", "failing", (Paragraph(_NOTE, note=True), *listed(boxes, Paragraph))
    )


def _failure(failure: Failure) -> Iterator[Block]:
    named: list[Inline] = [Span(failure[key], "code") for key in ("oracle", "dtype", "config")]
    parts: list[Inline] = [Span(failure["variant"], "strong")]
    for one in (*named, words.of_failing(failure)):
        parts += [" · ", one]
    yield Paragraph(tuple(parts))
    if "known" in failure:
        yield Paragraph(f"A known defect: {failure['known']}.")
    yield Code(text.shorter(failure["message"], MESSAGE))
    if failure["total"]:
        place = (" at ", Span(failure["where"], "code")) if failure["where"] else ()
        share = text.share(failure["count"], failure["total"])
        numbers = f": got {text.exact(failure['got'])}, bound {text.number(failure['bound'])}."
        yield Paragraph((f"{share} elements at fault. Worst", *place, numbers), note=True)
    yield Code(failure["replay"], "sh")
