"""What lies beside a report in its folder: the device's probes, the sanitizers' account, the speed
of its kernels and what explains it, read, summed up and counted in.

None is part of the evidence of a run: each is measured by commands of their own, before it or
after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verify.brief import counted
from verify.document import Line, Paragraph, Section, Span
from verify.evidence.strict_json import decode, loads
from verify.probes.report import ProbeReport
from verify.probes.report import read as read_probes
from verify.profiling.record import NAME as PROFILES
from verify.profiling.record import Profiles
from verify.profiling.record import read as read_profiles
from verify.report import words
from verify.report.build import overall
from verify.report.schema import BesideReport, Report, Status
from verify.sanitizers.account import Account
from verify.sanitizers.exports import uncaught
from verify.timing.record import NAME as BENCH
from verify.timing.record import Benchmark, parse

FILES = {
    "probes": "probes.json",
    "sanitizer": "sanitizer.json",
    "bench": BENCH,
    "profiles": PROFILES,
}


@dataclass(frozen=True)
class Beside:
    """None: there is no such file, or it cannot be used; `unusable` says why, by name."""

    probes: ProbeReport | None = None
    sanitizer: Account | None = None
    bench: Benchmark | None = None
    profiles: Profiles | None = None
    unusable: dict[str, str] = field(default_factory=dict)


def look(folder: Path, device: dict[str, Any]) -> Beside:
    """What lies in a folder; a file that cannot be read, or is of another device than `device`,
    cannot be used."""
    found: dict[str, Any] = {}
    unusable: dict[str, str] = {}
    for name, file in FILES.items():
        path = folder / file
        if not path.exists():
            continue
        try:
            one = _READERS[name](path)
        except (OSError, ValueError, RecursionError) as error:
            unusable[name] = f"{file} cannot be read: {error}"
            continue
        theirs = (one if isinstance(one, dict) else vars(one))["device"].get("slug")
        if theirs == device.get("slug"):
            found[name] = one
        else:
            unusable[name] = f"{file} is of another device: {theirs}"
    return Beside(**found, unusable=unusable)


_READERS: dict[str, Callable[[Path], Any]] = {
    "probes": read_probes,
    "sanitizer": lambda path: decode(Account, loads(path.read_text(encoding="utf-8"))),
    "bench": lambda path: parse(path.read_text(encoding="utf-8")),
    "profiles": read_profiles,
}


def joined(report: Report, beside: Beside) -> Report:
    """The report with an entry for each file beside it, and the status that follows; as it is where
    there is and was none."""
    entries = [_unusable(name, why) for name, why in beside.unusable.items()]
    if beside.probes is not None and ran(beside.probes):
        entries.append(_of_probes(beside.probes))
    if beside.sanitizer is not None:
        entries.append(_of_sanitizers(beside.sanitizer))
    if beside.bench is not None and beside.bench["rows"]:
        entries.append(_of_bench(beside.bench))
    if beside.profiles is not None and beside.profiles["profiles"]:
        entries.append(_of_profiles(beside.profiles))
    if not entries and not report.get("beside"):
        return report
    whole: Report = {**report, "beside": sorted(entries, key=lambda entry: entry["name"])}
    # in the schema's order, as it is read back: the same bytes however often it is written
    if "runs" in whole:
        whole["runs"] = whole.pop("runs")
    return {**whole, "status": overall(whole)}


def introduced(section: Section, report: Report, name: str, absent: Line) -> Section:
    """A section on one of FILES, with the status and the words of the report's entry; with `absent`
    where there is neither an entry nor a block to show."""
    entry = next((entry for entry in report.get("beside", []) if entry["name"] == name), None)
    if entry is not None:
        said = Paragraph(Span(entry["said"], "bad" if entry["status"] == "red" else "soft"))
        mark = words.mark(entry["status"], 1)
        return replace(section, blocks=(said, *section.blocks), mark=mark)
    return section if section.blocks else replace(section, blocks=(Paragraph(absent),))


def _unusable(name: str, why: str) -> BesideReport:
    return {"name": name, "status": "grey", "said": why}


def ran(probes: ProbeReport) -> int:
    """How many probes were tried that have something to agree with."""
    return len(probes.compared)


def _of_probes(probes: ProbeReport) -> BesideReport:
    """Its status and one line: red if anything disagrees with the tables or the manual, grey if a
    probe failed."""
    manual = " or with the PTX manual" if probes.conformance else ""
    wrong = [probe.name for probe in probes.compared if not probe.agrees]
    failed = [name for name in probes.failed if name not in wrong]
    about = f"{ran(probes)} probes on {probes.arch or 'an unknown arch'}"
    if wrong:
        said = (
            f"{len(wrong)} of {about} disagree with the tables that the bounds rely on{manual}:"
            f" {', '.join(wrong)}."
        )
    elif failed:
        said = (
            f"{len(failed)} of {about} failed: {', '.join(failed)}; the others agree with the"
            f" tables{manual}."
        )
    else:
        said = f"{about}: nothing disagrees with the tables that the bounds rely on{manual}."
    if guessed := [probe.name for probe in probes.matrix if probe.guess]:
        said += f" {len(guessed)} are not in the tables."
    return {
        "name": "probes",
        "status": "red" if wrong else "grey" if failed else "green",
        "said": said,
    }


def _of_sanitizers(account: Account) -> BesideReport:
    """Its status and one line: red if a kernel is faulty, under another tool too, grey if something
    is inconclusive or a planted fault was missed."""
    outcomes = [outcome for tried in account["tried"] for outcome in tried["cases"].values()]
    bad = [outcome for outcome in outcomes if outcome != "clean"]
    further = account.get("further", [])
    planted = [p for run in (account, *further) for p in run["planted"]]
    missed = sorted({f"{p['tool']} on {p['variant']}" for p in planted if not p["holds"]})
    others_bad = {o for run in further for tried in run["tried"] for o in tried["cases"].values()}
    status: Status = "red" if {"faulty", "failed"} & {*bad, *others_bad} else "green"
    missed += [f"{copy}, which nothing caught" for copy in uncaught(account["planted"])]
    if status == "green" and (
        bad
        or missed
        or not outcomes
        or "inconclusive" in others_bad
        or any(w["dead"] for w in account["waivers"])
    ):
        status = "grey"
    records = sum(process["total"] for tried in account["tried"] for process in tried["processes"])
    *others, last = account["tools"]
    tools = f"{', '.join(others)} and {last}" if others else last
    said = f"{counted(records, 'record')} in {counted(len(outcomes), 'case')} under {tools}"
    said += f", {len(bad)} not clean" if bad else ""
    caught = [p for p in planted if p["wanted"] == "caught"]
    said += (
        f"; {sum(p['holds'] for p in caught)} of {counted(len(caught), 'planted fault')} caught."
    )
    return {
        "name": "sanitizer",
        "status": status,
        "said": said + (f" Not as wanted: {', '.join(missed)}." if missed else ""),
    }


def _of_bench(record: Benchmark) -> BesideReport:
    """Its status and one line: red if values differ between kernels.  Speed itself is no status,
    nor is a workload that cannot be timed."""
    rows = record["rows"]
    differ = sorted({row["variant"] for row in rows if row.get("differs")})
    failed = sorted({row["variant"] for row in rows if row["outcome"] == "failed"})
    timed = [row for row in rows if row["outcome"] == "timed"]
    variants = counted(len({row["variant"] for row in timed}), "variant")
    said = f"{counted(len(timed), 'row')} of {variants} timed."
    said += f" Values differ from those of the others: {', '.join(differ)}." if differ else ""
    said += f" Not timed on some workload: {', '.join(failed)}." if failed else ""
    status: Status = "red" if differ else "green"
    return {"name": "bench", "status": status, "said": said}


def _of_profiles(record: Profiles) -> BesideReport:
    """One line; no number of a profile is a status."""
    kernels = [kernel for one in record["profiles"] for kernel in one["kernels"]]
    variants = counted(len({one["variant"] for one in record["profiles"]}), "variant")
    conflicts = sum((kernel["values"].get("conflicts_ldsm") or 0) > 0 for kernel in kernels)
    said = f"{counted(len(kernels), 'kernel')} of {variants} under ncu"
    said += f"; {conflicts} with bank conflicts of ldmatrix." if conflicts else "."
    return {"name": "profiles", "status": "green", "said": said}
