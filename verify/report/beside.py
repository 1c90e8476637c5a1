"""What lies beside a report in its folder: the device's probes and the sanitizers' account, read,
summed up and counted in.

Neither is part of the evidence of a run: both are measured by commands of their own, before it or
after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verify.evidence.strict_json import decode, loads
from verify.report import probed, sanitized
from verify.report.build import overall
from verify.report.schema import BesideReport, Report
from verify.sanitizers.account import Account

if TYPE_CHECKING:
    from verify.probes.report import ProbeReport

FILES = {"probes": "probes.json", "sanitizer": "sanitizer.json"}


@dataclass(frozen=True)
class Beside:
    """None: there is no such file, or it cannot be used; `unusable` says why, by name."""

    probes: ProbeReport | None = None
    sanitizer: Account | None = None
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
            one = (
                _read_probes(path)
                if name == "probes"
                else decode(Account, loads(path.read_text(encoding="utf-8")))
            )
        except (OSError, ValueError, RecursionError) as error:
            unusable[name] = f"{file} cannot be read: {error}"
            continue
        theirs = (one if isinstance(one, dict) else vars(one))["device"].get("slug")
        if theirs == device.get("slug"):
            found[name] = one
        else:
            unusable[name] = f"{file} is of another device: {theirs}"
    return Beside(found.get("probes"), found.get("sanitizer"), unusable)


def _read_probes(path: Path) -> ProbeReport:
    from verify.probes.report import read  # needs what probes need, which no other report does

    return read(path)


def joined(report: Report, beside: Beside) -> Report:
    """The report with an entry for each file beside it, and the status that follows; as it is where
    there is and was none."""
    entries = [_unusable(name, why) for name, why in beside.unusable.items()]
    if beside.probes is not None and probed.ran(beside.probes):
        entries.append(probed.entry(beside.probes))
    if beside.sanitizer is not None:
        entries.append(sanitized.entry(beside.sanitizer))
    if not entries and not report.get("beside"):
        return report
    whole: Report = {**report, "beside": sorted(entries, key=lambda entry: entry["name"])}
    # in the schema's order, as it is read back: the same bytes however often it is written
    if "runs" in whole:
        whole["runs"] = whole.pop("runs")
    return {**whole, "status": overall(whole)}


def _unusable(name: str, why: str) -> BesideReport:
    return {"name": name, "status": "grey", "said": why}
