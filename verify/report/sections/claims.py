"""Claims: what each judged variant declares, what marks it, and how often it can still fail."""

from __future__ import annotations

from verify.document import Inline, List, Paragraph, Section, Span
from verify.report.beside import Beside
from verify.report.rate import NOTE, rate
from verify.report.schema import Report, VariantReport
from verify.report.states import CLAIMS, GRAVE, claimed, claims, states, unjudged
from verify.report.tables import ordered

ORDER = 30


def section(report: Report, beside: Beside) -> Section | None:
    """One entry per variant that was judged."""
    judged = [variant for variant in ordered(report) if claimed(variant)]
    if not judged:
        return None
    note = Paragraph(f"{CLAIMS} {NOTE}", note=True)
    return Section("Claims", "claims", (note, List(tuple(map(_claim, judged)))))


def _claim(variant: VariantReport) -> tuple[Inline, ...]:
    found: list[Inline] = [Span(variant["ref"], "strong"), f": {claims(variant)}."]
    for state in states(variant):
        found += [" ", Span(str(state), "warn" if state.name in GRAVE else "soft"), "."]
    found += [f" {said}." for said in (rate(variant), unjudged(variant)) if said]
    return tuple(found)
