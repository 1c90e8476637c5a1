"""What a report says in one word, for exit codes and for the first line that a person reads."""

from __future__ import annotations

from typing import Literal

from verify.report.schema import DTypeReport, Report, VariantReport
from verify.report.tables import why

Outcome = Literal["clean", "failed", "incomplete"]


def outcome(report: Report) -> Outcome:
    """failed: something fails that no known defect explains.  incomplete: nothing does, but not all
    was judged.

    A known defect keeps a report red, and does not count here.
    """
    if failing(report):
        return "failed"
    return "incomplete" if incomplete(report) else "clean"


def failing(report: Report) -> list[str]:
    """What fails and is no known defect, by name: variants, and files that lie beside the
    report."""
    beside = [entry["name"] for entry in report.get("beside", []) if entry["status"] == "red"]
    return [variant["ref"] for variant in report["variants"] if news(variant)] + beside


def news(variant: VariantReport) -> bool:
    """Whether something of the variant fails that no known defect explains."""
    known = bool(variant["failing"]) and all("known" in failure for failure in variant["failing"])
    return variant["status"] == "red" and (
        not known or any(b["failing"] for b in variant["builds"])
    )


def incomplete(report: Report) -> list[tuple[str, str]]:
    """(name, why) of what was not judged as a whole: variants, what lies beside the report, and ""
    for the report itself.

    A variant that is listed as not run, with the reason, does not count, unless no variant was
    judged at all.
    """
    listed = {row["variant"] for row in report["not_run"] if not row["dtype"]}
    unjudged = [*report["lost"], *report.get("interrupted", [])]
    lost = {begin["variant"] for begin in unjudged}
    found = [("", reason) for reason in report["reasons"]]
    for variant in report["variants"]:
        grey = variant["status"] == "grey" and (variant["cases"] or variant["ref"] not in listed)
        if grey or (
            variant["status"] == "red"
            and (variant["ref"] in lost or any(map(short, variant["dtypes"])))
        ):
            found.append((variant["ref"], why(variant)))
    found += [
        (entry["name"], entry["said"])
        for entry in report.get("beside", [])
        if entry["status"] == "grey"
    ]
    return found or ([] if report["cases"] else [("", "no variant was judged")])


def short(dtype: DTypeReport) -> bool:
    """Whether a required coverage bin of a dtype is empty, or nothing of it was judged."""
    return not dtype["cases"] or bool(dtype["bins_missing"])
