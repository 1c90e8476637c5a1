"""A report for other programs: JUnit XML, SARIF 2.1.0, annotations of GitHub, a short summary."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from verify.document import junit as xml
from verify.document import markdown
from verify.document.text import one_line
from verify.evidence.strict_json import encode
from verify.report.beside import Beside
from verify.report.document import document
from verify.report.schema import Failure, Report, VariantReport

SUMMARY_LIMIT = 60_000  # bytes: what a comment on a pull request holds
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_ANNOTATIONS = 10  # GitHub shows as many of a step


def junit(report: Report) -> str:
    """JUnit XML: a test case for each variant, dtype, group and oracle that judged a case, or that
    failed; a failure that is a known defect counts as skipped."""
    cases = [case for variant in report["variants"] for case in _cases(variant)]
    for left in report["not_run"]:
        case = xml.case(left["variant"], left["dtype"] or "run")
        xml.skip(case, left["reason"])
        cases.append(case)
    return xml.document("attention-verify", cases)


def _cases(variant: VariantReport) -> Iterator[xml.Case]:
    for dtype in variant["dtypes"]:
        failing = [f for f in variant["failing"] if f["dtype"] == dtype["dtype"]]
        told: set[str] = set()
        for oracle in dtype["oracles"]:
            if not oracle["cases"] and not oracle["failures"]:
                continue
            name = oracle["oracle"]
            case = xml.case(f"{variant['ref']}.{dtype['dtype']}", f"{oracle['group']}: {name}")
            if oracle["failures"]:
                told.add(name)
                _tell(case, [f for f in failing if f["oracle"] == name], oracle["failures"])
            yield case
        for failure in failing:  # of oracles that judge a campaign, or while shrinking
            if failure["oracle"] not in told:
                case = xml.case(f"{variant['ref']}.{dtype['dtype']}", failure["oracle"])
                _tell(case, [failure], failure["cases"])
                yield case


def _tell(case: xml.Case, failing: list[Failure], count: int) -> None:
    news = [failure for failure in failing if "known" not in failure]
    if failing and not news:
        xml.skip(case, f"known: {failing[0].get('known', '')}")
        return
    message = news[0]["message"] if news else f"{count} cases fail"
    xml.fail(case, message, "\n\n".join(map(_told, news)))


def _told(failure: Failure) -> str:
    names = ("config", "case", "got", "bound", "where", "replay")
    return "\n".join(f"{name}: {failure[name]}" for name in names)  # type: ignore[literal-required]


def sarif(report: Report) -> dict[str, Any]:
    """A SARIF 2.1.0 log with one result for each failing case that the report names; a known defect
    is suppressed."""
    found = [(v, failure) for v in report["variants"] for failure in v["failing"]]
    rules = list(dict.fromkeys(failure["oracle"] for _, failure in found))
    run = {
        "tool": {"driver": {"name": "attention-verify", "rules": [{"id": rule} for rule in rules]}},
        "results": [_result(v, failure, rules.index(failure["oracle"])) for v, failure in found],
        "columnKind": "utf16CodeUnits",
        "invocations": [{"executionSuccessful": report["status"] != "grey"}],
        "properties": {"run": report["run"], "device": encode(report["device"])},
    }
    return {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(variant: VariantReport, failure: Failure, rule: int) -> dict[str, Any]:
    place = {"artifactLocation": {"uri": variant["path"]}, "region": {"startLine": 1}}
    names = ("variant", "config", "dtype", "case", "got", "bound", "where", "replay")
    result: dict[str, Any] = {
        "ruleId": failure["oracle"],
        "ruleIndex": rule,
        "level": "error",
        "message": {"text": f"{failure['message']} ({failure['replay']})"},
        "locations": [{"physicalLocation": place}],
        "properties": {name: encode(failure[name]) for name in names},  # type: ignore[literal-required]
    }
    if "known" in failure:
        result["suppressions"] = [{"kind": "external", "justification": failure["known"]}]
    return result


def github(report: Report) -> list[str]:
    """Lines that GitHub shows at the kernel's file, one for each failing case that is no known
    defect; none outside of a workflow of GitHub."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return []
    found = [
        (variant["path"], failure)
        for variant in report["variants"]
        for failure in variant["failing"]
        if "known" not in failure
    ]
    return [_annotation(path, failure) for path, failure in found[:_ANNOTATIONS]]


def _annotation(path: str, failure: Failure) -> str:
    title = f"{failure['oracle']} convicts {failure['variant']} in {failure['dtype']}"
    said = _data(f"{one_line(failure['message'])}\n{failure['replay']}")
    return f"::error file={_property(path)},line=1,title={_property(title)}::{said}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def summary(report: Report) -> str:
    """The report without its details, in Markdown, short enough for a pull request."""
    page = document(report, Beside())
    return markdown.render(page, rest="the report that this command wrote", limit=SUMMARY_LIMIT)
