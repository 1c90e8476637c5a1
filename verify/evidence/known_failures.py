"""Defects that are known and that somebody else has to mend: failing verdicts that a campaign
expects, each with a link, a last day, and a case that shows the defect.

They stand in `xfails.toml` of the current directory, one `[[xfail]]` table for each `Xfail`.  The
file belongs to the person who runs the suite.

A verdict that is expected is on record as the failing one that it is, and the report shows it; it
fails no test and no command.

A command reads the file once, before any kernel is loaded, and passes the text on to its processes
(`handed_on`): a kernel that writes such a file excuses nothing.  Its hash stands among the versions
of the run's record.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from verify.brief import shown
from verify.evidence import Evidence, Verdict, Verdicts, strict_json

FILE = "xfails.toml"
_HANDED = "VERIFY_XFAILS_TEXT"  # the text, from the process that read it to those that it starts
_LARGEST = 100_000  # bytes: what one variable of a process's environment holds
# What the file of a directory said when this process, or the one that started it, began there.
_read_here: dict[Path, str] = {}


class XfailsError(ValueError):
    """xfails.toml is malformed or incomplete; one line, with the entry and the field."""


class Xfail(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One known defect.

    cases: a regular expression that matches whole case ids.  link: where the defect is described.
    expires: the last day on which it is expected.  witness: the id of a case that fails as long as
    the defect is there; one of `cases`.  oracles: those that may convict, all if it is left out.
    device: the device's name as a shell pattern ("NVIDIA H100*"), any if it is left out.
    """

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
        failing = verdicts.failing if isinstance(verdicts, Verdicts) else verdicts
        return [
            verdict
            for verdict in failing
            if verdict.outcome == "fail" and self.expecting(verdict) is None
        ]

    def shown_by(self, case: str) -> Xfail | None:
        """The entry whose witness that case is, or None."""
        return next((entry for entry in self.entries if entry.witness == case), None)


def _expects(entry: Xfail, verdict: Verdict) -> bool:
    named = not entry.oracles or verdict.oracle in entry.oracles
    return (
        verdict.outcome == "fail" and named and re.fullmatch(entry.cases, verdict.case) is not None
    )


def at_start() -> str:
    """What the current directory's file said when this command began; "" if there was none.

    The first call reads, or takes what the process before handed on; later calls repeat it.  Raises
    XfailsError, for a file that makes no sense too.
    """
    if Path.cwd() not in _read_here:
        handed = os.environ.pop(_HANDED, None)  # kernels inherit the environment
        begin_with(_text(Path(FILE)) if handed is None else handed)
    return _read_here[Path.cwd()]


def begin_with(text: str) -> None:
    """Take that text for the file's from now on.  Raises XfailsError if it makes no sense."""
    _entries(text, FILE)
    _read_here[Path.cwd()] = text


def handed_on() -> dict[str, str]:
    """The environment variable by which a process that is started gets the text.  Raises
    XfailsError."""
    return {_HANDED: at_start()}


def changed_since() -> bool:
    """Whether the file says something else now than when this command began."""
    try:
        return _text(Path(FILE)) != at_start()
    except XfailsError:
        return True


def digest(text: str) -> str:
    """The text's hash for evidence and reports: "none" if it says nothing."""
    return sha256(text.encode()).hexdigest()[:12] if text else "none"


def xfails_of(path: Path, device: str, day: date) -> Xfails:
    """What that file expects of a device, by its name, on that day; nothing, if there is no such
    file.  Raises XfailsError."""
    return _expected(_entries(_text(path), str(path)), device, day)


def xfails_for(fingerprint: Mapping[str, Any], started: str = "") -> Xfails:
    """What the file as it was `at_start` expects of that device, on the day on which a run started,
    or today.  Raises XfailsError."""
    digits = re.sub(r"\D", "", started)[:8]
    known = len(digits) == 8
    day = datetime.strptime(digits, "%Y%m%d").replace(tzinfo=UTC) if known else datetime.now(UTC)
    return _expected(_entries(at_start(), FILE), str(fingerprint.get("name")), day.date())


def xfails_in(evidence: Evidence) -> Xfails:
    """What the file as it was `at_start` expected of that evidence's device when its run began.
    Raises XfailsError."""
    return xfails_for(evidence.run.device, evidence.run.started)


def _expected(entries: Iterable[Xfail], device: str, day: date) -> Xfails:
    here = (entry for entry in entries if fnmatchcase(device, entry.device))
    return Xfails(tuple(entry for entry in here if day <= entry.expires))


def _text(path: Path) -> str:
    """What a file says; "" if there is no such file, or no ordinary one."""
    if not path.is_file():
        return ""
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise XfailsError(f"{path}: {error}") from None
    if len(data) > _LARGEST:
        raise XfailsError(f"{path}: {len(data)} bytes are more than {_LARGEST}")
    return text


def _entries(text: str, where: str) -> tuple[Xfail, ...]:
    try:
        data = tomllib.loads(text)
    except ValueError as error:
        raise XfailsError(f"{where}: {shown(str(error))[1:-1]}") from None
    except RecursionError:
        raise XfailsError(f"{where}: is nested too deeply") from None
    tables = data.get("xfail", [])
    if set(data) - {"xfail"} or not isinstance(tables, list):
        raise XfailsError(f"{where}: holds nothing but [[xfail]] tables")
    return tuple(
        _entry(table, f"{where}: xfail {number}") for number, table in enumerate(tables, 1)
    )


def _entry(table: object, where: str) -> Xfail:
    try:
        entry = strict_json.decode(Xfail, table, where)
    except strict_json.ShapeError as error:
        raise XfailsError(f"{error} (its fields: {', '.join(Xfail.__struct_fields__)})") from None
    try:
        matches = re.fullmatch(entry.cases, entry.witness) is not None
    except (re.error, OverflowError, RecursionError) as error:
        raise XfailsError(f"{where}: cases is no regular expression: {error}") from None
    if not matches:
        raise XfailsError(f"{where}: its witness is none of its cases: {shown(entry.witness)}")
    return entry
