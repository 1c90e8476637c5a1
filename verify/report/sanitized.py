"""The sanitizers' account, `sanitizer.json`, as a section of the report."""

from __future__ import annotations

from verify.report import text
from verify.report.schema import BesideReport, Report, Status
from verify.sanitizers.account import Account, Planted

COLUMNS = ("variant", "tool", "configs and dtypes", "processes", "cases", "records", "verdict")


def entry(account: Account) -> BesideReport:
    """Its status and one line: red if a kernel is faulty, grey if something is inconclusive or a
    planted fault was missed."""
    outcomes = [outcome for tried in account["tried"] for outcome in tried["cases"].values()]
    bad = [outcome for outcome in outcomes if outcome != "clean"]
    missed = sorted(
        {f"{p['tool']} on {p['variant']}" for p in account["planted"] if not p["holds"]}
    )
    status: Status = "red" if {"faulty", "failed"} & set(bad) else "green"
    if status == "green" and (
        bad or missed or not outcomes or any(w["dead"] for w in account["waivers"])
    ):
        status = "grey"
    records = sum(process["total"] for tried in account["tried"] for process in tried["processes"])
    said = (
        f"{_number(records, 'record')} in {_number(len(outcomes), 'case')} under"
        f" {' and '.join(account['tools'])}"
    )
    said += f", {len(bad)} not clean" if bad else ""
    caught = [p for p in account["planted"] if p["wanted"] == "caught"]
    said += (
        f"; {sum(p['holds'] for p in caught)} of {_number(len(caught), 'planted fault')} caught."
    )
    return {
        "name": "sanitizer",
        "status": status,
        "said": said + (f" Not as wanted: {', '.join(missed)}." if missed else ""),
    }


def rows(account: Account, report: Report) -> list[tuple[str, ...]]:
    """Cells under COLUMNS, one row per variant and tool; the variant's name stands in its first row
    alone."""
    hashes = {variant["ref"]: variant["source_hash"] for variant in report["variants"]}
    found, last = [], ""
    for ref, tool in dict.fromkeys((t["variant"], t["tool"]) for t in account["tried"]):
        mine = [t for t in account["tried"] if (t["variant"], t["tool"]) == (ref, tool)]
        outcomes = [outcome for t in mine for outcome in t["cases"].values()]
        bad = [outcome for outcome in outcomes if outcome != "clean"]
        verdict = (
            f"{len(bad)} of {len(outcomes)} {'/'.join(sorted(set(bad)))}"
            if bad
            else "clean"
            if outcomes
            else "not tried"
        )
        if hashes.get(ref) not in (None, mine[0]["source_hash"]):
            verdict += "; of another source than this report's"
        totals = [process["total"] for t in mine for process in t["processes"]]
        numbers = (len(mine), len(totals), len(outcomes), sum(totals))
        found.append(("" if ref == last else ref, tool, *map(str, numbers), verdict))
        last = ref
    return found


def planted(account: Account) -> tuple[list[str], list[tuple[str, str, list[tuple[str, bool]]]]]:
    """Tools, and per planted kernel its name, what it does, and per tool (what came of it, whether
    that was wanted)."""
    found: dict[tuple[str, str], dict[str, tuple[str, bool]]] = {}
    for p in account["planted"]:
        found.setdefault((p["variant"], p["about"]), {})[p["tool"]] = (_word(p), p["holds"])
    rows = [
        (*name, [cells.get(tool, (text.NONE, True)) for tool in account["tools"]])
        for name, cells in found.items()
    ]
    return account["tools"], rows


def _word(p: Planted) -> str:
    if p["wanted"] == "caught":
        return "caught" if p["holds"] else f"{p['outcome']}: not caught"
    if p["wanted"] == "any":
        return "not its matter" if p["outcome"] == "clean" else p["outcome"]
    return p["outcome"] if p["holds"] else f"{p['outcome']}, wanted clean"


def findings(account: Account) -> list[tuple[str, str, str]]:
    """(tool, outcome, case) of every case that is not clean."""
    return [
        (t["tool"], out, case)
        for t in account["tried"]
        for case, out in t["cases"].items()
        if out != "clean"
    ]


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + "s" * (count != 1)
