"""Defects that are known and that somebody else has to mend: failing verdicts that a campaign expects, each with a link, a last
day, and a case that shows the defect.

They stand in `xfails.toml` of the current directory, which belongs to whoever runs the suite:

    [[xfail]]
    cases = "torch-cudnn-backward:.*,dist=negative_lse.*"   # a regular expression that matches whole case ids
    link = "docs/findings.md, 14"                           # where the defect is told
    expires = 2027-06-30                                    # the last day on which it is expected
    witness = "torch-cudnn-backward:default:..."            # the id of a case that fails as long as the defect is there
    oracles = ["gradient_bound"]                            # who may convict; all, if left out
    device = "NVIDIA H100*"                                 # the device's name, as in a shell; any, if left out

A verdict that is expected is on record as the failing one that it is, and the report shows it; it fails no test and no command.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from verify.evidence import Evidence, Verdict

FILE = "xfails.toml"


class XfailsError(ValueError):
    """A file of known defects that says too little, or what nobody understands."""


@dataclass(frozen=True, kw_only=True)
class Xfail:
    """One known defect; the fields are told above."""

    cases: str
    link: str
    expires: date
    witness: str
    oracles: tuple[str, ...] = ()
    device: str = "*"

    @property
    def told(self) -> str:
        """For a reader: where the defect is told, and until when it is expected."""
        return f"{self.link}, expected until {self.expires.isoformat()}"


@dataclass(frozen=True)
class Xfails:
    """The known defects that count on one device on one day."""

    entries: tuple[Xfail, ...] = ()

    def expecting(self, verdict: Verdict) -> Xfail | None:
        """The entry that expects this verdict to fail, or None."""
        return next((entry for entry in self.entries if _expects(entry, verdict)), None)

    def unexpected(self, verdicts: Iterable[Verdict]) -> list[Verdict]:
        """Those that fail and should not."""
        return [verdict for verdict in verdicts if verdict.outcome == "fail" and self.expecting(verdict) is None]

    def shown_by(self, case: str) -> Xfail | None:
        """The entry whose witness that case is, or None."""
        return next((entry for entry in self.entries if entry.witness == case), None)


def _expects(entry: Xfail, verdict: Verdict) -> bool:
    named = not entry.oracles or verdict.oracle in entry.oracles
    return verdict.outcome == "fail" and named and re.fullmatch(entry.cases, verdict.case) is not None


def xfails_of(path: Path, device: str, day: date) -> Xfails:
    """What that file expects of a device, by its name, on that day; nothing, if there is no such file.  Raises XfailsError."""
    entries = _read(path) if path.is_file() else ()
    return Xfails(tuple(entry for entry in entries if fnmatchcase(device, entry.device) and day <= entry.expires))


def xfails_for(fingerprint: Mapping[str, Any], started: str = "") -> Xfails:
    """What the current directory's file expects of that device, on the day on which a run started, or today."""
    digits = re.sub(r"\D", "", started)[:8]
    day = datetime.strptime(digits, "%Y%m%d").replace(tzinfo=UTC) if len(digits) == 8 else datetime.now(UTC)
    return xfails_of(Path(FILE), str(fingerprint.get("name")), day.date())


def xfails_in(evidence: Evidence) -> Xfails:
    """What the current directory's file expected of that evidence's device when its run began.  Raises XfailsError."""
    return xfails_for(evidence.run.device, evidence.run.started)


def _read(path: Path) -> tuple[Xfail, ...]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise XfailsError(f"{path}: {error}") from None
    tables = data.get("xfail", [])
    if set(data) - {"xfail"} or not isinstance(tables, list):
        raise XfailsError(f"{path}: holds nothing but [[xfail]] tables")
    return tuple(_entry(table, f"{path}: xfail {number}") for number, table in enumerate(tables, 1))


_KINDS = {"cases": str, "link": str, "witness": str, "device": str, "expires": date, "oracles": list}


def _entry(table: dict[str, Any], where: str) -> Xfail:
    names = [field.name for field in fields(Xfail)]
    for name in table:
        if name not in names:
            raise XfailsError(f"{where}: {name!r} is none of {', '.join(names)}")
    for name in ("cases", "link", "expires", "witness"):
        if name not in table:
            raise XfailsError(f"{where}: has no {name}")
    for name, value in table.items():
        if not isinstance(value, _KINDS[name]) or isinstance(value, datetime):
            raise XfailsError(f"{where}: {name} must be a {_KINDS[name].__name__}, not {value!r}")
    entry = Xfail(**{**table, "oracles": tuple(table.get("oracles", ()))})
    try:
        matches = re.fullmatch(entry.cases, entry.witness) is not None
    except re.error as error:
        raise XfailsError(f"{where}: cases is no regular expression: {error}") from None
    if not matches:
        raise XfailsError(f"{where}: its witness is none of its cases: {entry.witness}")
    return entry
