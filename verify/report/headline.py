"""The first line of a report, alike on the terminal, in Markdown and in HTML: what is new first."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from verify.report import power, words
from verify.report.schema import Report
from verify.report.states import GRAVE, states
from verify.report.tables import build_counts


class Failures(NamedTuple):
    """What fails, apart from each other.

    known: defects of xfails.toml that showed, counted once per variant.  new: kinds of failures
    that none of them explains: (variant, config, oracle), (variant, architecture) whose builds do
    not compile, and red files beside the report.
    """

    known: int
    new: int

    def __str__(self) -> str:
        return f"{self.known} known failure{'s' * (self.known != 1)}, {self.new} new"


def failures(report: Report) -> Failures:
    """Known and new failures of a report."""
    cases = [failure for variant in report["variants"] for failure in variant["failing"]]
    known = {(failure["variant"], failure["known"]) for failure in cases if "known" in failure}
    new = [failure for failure in cases if "known" not in failure]
    builds = [b for variant in report["variants"] for b in variant["builds"] if b["failing"]]
    beside = [entry for entry in report.get("beside", []) if entry["status"] == "red"]
    return Failures(len(known), len(new) + len(builds) + len(beside))


def variants(report: Report) -> str:
    """ "27 variants: 1 failing, 17 passing, 9 not run"."""
    found = Counter(
        words.label(variant["status"], variant["cases"]) for variant in report["variants"]
    )
    called = {
        "FAIL": "failing",
        "pass": "passing",
        "incomplete": "incomplete",
        "not run": "not run",
    }
    parts = [f"{found[key]} {word}" for key, word in called.items() if found[key]]
    total = len(report["variants"])
    return f"{total} variant{'s' * (total != 1)}: {', '.join(parts) or 'none'}"


def headline(report: Report) -> str:
    """Known and new failures; how many variants pass, fail, are incomplete or were not run, over
    how many cases; how many builds compile; and the smallest fault that would have failed."""
    said = (
        f"{failures(report)}. {variants(report)}. {report['cases']:,} judged cases,"
        f" {report['failures']:,} failing."
    )
    tried, broken = build_counts(b for variant in report["variants"] for b in variant["builds"])
    said += f" {tried:,} builds compiled, {broken:,} failing." if tried else ""
    for name in GRAVE:
        marked = sum(any(state.name == name for state in states(v)) for v in report["variants"])
        said += f" {marked} {name}." if marked else ""
    noticed = power.summary(report)
    return f"{said} {noticed}" if noticed else said
