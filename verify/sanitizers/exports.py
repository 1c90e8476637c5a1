"""sanitizer.json for other programs: SARIF 2.1.0 and JUnit XML, made from it alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from verify.document import junit as xml
from verify.evidence.strict_json import encode
from verify.sanitizers.account import Account, Failed, Further, Planted, Shown
from verify.sanitizers.counts import tool_version

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"Info": "note", "Warning": "warning"}


def sarif(account: Account) -> dict[str, Any]:
    """A SARIF 2.1.0 log with one result for each failure of a kernel; runs that tried something
    else are runs of their own."""
    runs = [_sarif(account, not_over=not account.get("cut"))]
    runs += [_sarif(one, not_over=not one["cut"]) for one in account.get("further", [])]
    return {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": runs}


def _sarif(account: Account | Further, *, not_over: bool) -> dict[str, Any]:
    """One run of a SARIF log."""
    failures = account.get("failures", [])
    rules = list(dict.fromkeys(_rule(failure) for failure in failures))
    named = [tool_version(account, tool).partition(" ") for tool in account["tools"]]
    name, _, version = next(filter(any, named), ("verify", "", ""))
    driver = {
        "name": name,
        "version": version,
        "rules": [{"id": rule} for rule in rules],
    }
    return {
        "tool": {"driver": driver},
        "results": [_result(failure, rules.index(_rule(failure))) for failure in failures],
        "columnKind": "utf16CodeUnits",
        "invocations": [{"executionSuccessful": _proved(account) and not_over}],
        "properties": {"run": account["run"], "device": encode(account["device"])},
    }


def _proved(account: Account | Further) -> bool:
    """Whether the tools ran and were alive."""
    planted = account["planted"]
    alive = all(one["holds"] for one in planted) and not uncaught(planted)
    return bool(account["tried"]) and alive


def untried(planted: Iterable[Planted]) -> set[str]:
    """Known-bad copies of a run that ended before any process of theirs had."""
    copies = [one for one in planted if one.get("copy_of")]
    tried = {copy["variant"] for copy in copies if copy["outcome"] != "not run"}
    return {copy["variant"] for copy in copies} - tried


def uncaught(planted: Iterable[Planted]) -> list[str]:
    """Known-bad copies of shipped kernels that nothing caught, and that something had to catch."""
    every = list(planted)
    caught = {one["variant"] for one in every if one["record"] is not None or one.get("hangs")}
    return sorted(due(every) - caught)


def due(planted: Iterable[Planted]) -> set[str]:
    """The known-bad copies that a tool of the run must catch: the others it does not see, by
    design."""
    copies = (one for one in planted if one.get("copy_of"))
    return {one["variant"] for one in copies if one.get("spare") or one["wanted"] == "caught"}


def _rule(failure: Failed) -> str:
    kind = failure["record"]["kind"] if failure["record"] else failure["outcome"]
    return "/".join(filter(None, (failure["tool"], str(kind))))


def _result(failure: Failed, rule: int) -> dict[str, Any]:
    record: Shown = failure["record"] or {}
    result: dict[str, Any] = {
        "ruleId": _rule(failure),
        "ruleIndex": rule,
        "level": _LEVELS.get(str(record.get("level")), "error"),
        "message": {"text": f"{failure['message']} ({failure['replay']})"},
        "properties": {
            **{name: failure[name] for name in ("case", "dtype", "replay", "frame")},
            **record,
        },
    }
    location = _location(record)
    return {**result, "locations": [location]} if location else result


def _location(record: Shown) -> dict[str, Any]:
    """The place in the source and the kernel's name, as far as the record has them."""
    location: dict[str, Any] = {}
    path, _, line = str(record.get("source", "")).rpartition(":")
    if path and line.isdecimal():
        artifact = {"uri": path} if path[0] == "/" else {"uri": path, "uriBaseId": "%SRCROOT%"}
        region = {"startLine": max(int(line), 1)}
        location["physicalLocation"] = {"artifactLocation": artifact, "region": region}
    if "kernel" in record:
        location["logicalLocations"] = [{"name": record["kernel"], "kind": "function"}]
    return location


def junit(account: Account) -> str:
    """JUnit XML: a test case for each planted fault and tool, and for each case and tool; each
    failure has one of its own."""
    cases = [*_planted(account), *_tried(account)]
    for left in account["not_run"]:
        case = xml.case(left["variant"], "sanitize")
        xml.skip(case, left["reason"])
        cases.append(case)
    return xml.document("sanitizers", cases, account["seconds"])


def _planted(account: Account) -> Iterator[xml.Case]:
    runs: dict[str, int] = {}
    for planted in account["planted"]:
        name = f"{planted['variant']} under {planted['tool']}"
        runs[name] = runs.get(name, 0) + 1
        again = f", run {runs[name]}" if runs[name] > 1 else ""
        case = xml.case("planted", name + again)
        if not planted["holds"]:
            said = "; ".join([planted["outcome"], *planted["reasons"]])
            xml.fail(case, f"wanted {planted['wanted']}, got {said}")
        yield case
    not_tried = untried(account["planted"])
    for copy in uncaught(account["planted"]):
        case = xml.case("planted", f"{copy} is caught")
        words = "was not run:" if copy in not_tried else "nothing caught"
        xml.fail(case, f"{words} this known-bad copy")
        yield case


def _tried(account: Account) -> Iterator[xml.Case]:
    for tried in account["tried"]:
        for case_id, outcome in tried["cases"].items():
            case = xml.case(tried["variant"], f"{case_id} under {tried['tool']}")
            if outcome == "not run":
                xml.error(case, f"not run: {account.get('cut')}")
            if outcome in ("clean", "not run"):
                yield case
    for failure in account.get("failures", []):
        name = f"{failure['case']} under {failure['tool'] or 'no tool'}"
        case = xml.case(failure["variant"], name)
        said = {
            **(failure["record"] or {}),
            "launched at": failure["frame"],
            "replay": failure["replay"],
        }
        lines = (f"{name}: {value}" for name, value in said.items() if value)
        xml.fail(case, failure["message"], "\n".join(lines))
        yield case
