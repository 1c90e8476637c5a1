"""The page over all reports of a folder, index.md: device, date, judge, cases, variants, state and
links."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from verify.document import (
    Document,
    Inline,
    Link,
    Paragraph,
    Row,
    Span,
    Table,
    count,
    markdown,
    text,
)
from verify.report import words
from verify.report.headline import failures, variants
from verify.report.json_file import read
from verify.report.schema import Report, ReportError

NAME = "index.md"
TITLE = "Reports"
_INTRODUCTION = (
    *("One folder for each device. ", Span("verify report --publish", "code"), " and "),
    *(Span("verify report --render", "code"), " write this page, and "),
    *(
        Span("verify recheck", "code"),
        " holds it against the reports. The date is the day on which",
    ),
    " the runs began, in UTC; the judge is the hash of the sources that judged, one for each"
    " version that did. Known failures are those of ",
    *(Span("xfails.toml", "code"), "; they leave a report red."),
)
_COLUMNS = ("device", "date", "judge", "cases", "variants", "state", "report")
_PAGES = ("report.md", "report.html", "report.json")


def render(parent: Path) -> str:
    """The page over the reports of `parent`, sorted by folder; a report that does not read is
    listed with the reason."""
    rows = tuple(_row(path.parent) for path in sorted(parent.glob("*/report.json")))
    lead = (Paragraph(_INTRODUCTION), Table(_COLUMNS, rows))
    return markdown.render(Document(TITLE, lead, ()))


def replaceable(parent: Path) -> bool:
    """Whether index.md of `parent` is missing or this page, and not a page of somebody else."""
    path = parent / NAME
    if not path.exists():
        return True
    try:
        return path.read_text(encoding="utf-8").split("\n", 1)[0] == f"# {TITLE}"
    except (OSError, ValueError):
        return False


def disagreements(parent: Path) -> list[str]:
    """One line if index.md of `parent` is not what the reports beside it make; a page that is not
    there, or is none of ours, contradicts nothing."""
    path = parent / NAME
    if not path.exists() or not replaceable(parent):
        return []
    has = path.read_text(encoding="utf-8").splitlines()
    should = render(parent).splitlines()
    most = max(len(has), len(should))
    pairs = zip(_filled(has, most), _filled(should, most), strict=True)
    differing = [(number, pair) for number, pair in enumerate(pairs, 1) if pair[0] != pair[1]]
    if not differing:
        return []
    number, (old, new) = differing[0]
    return [f"{path}, line {number}: has {old!r}, but the reports beside it make {new!r}"]


def _filled(lines: Sequence[str], most: int) -> list[str]:
    return [*lines, *[""] * (most - len(lines))]


def _row(folder: Path) -> Row:
    links: list[Inline] = []
    for name in _PAGES:
        links += [", "] * bool(links) + [Link(name, quote(f"{folder.name}/{name}"))]
    try:
        report = read(folder)
    except ReportError as error:
        reason = str(error).removeprefix(f"{folder / 'report.json'}: ")
        unknown = [text.NONE] * (len(_COLUMNS) - 3)
        return folder.name, *unknown, reason, tuple(links)
    return (
        *(str(report["device"].get("name", folder.name)), _dates(report)),
        Span(report["versions"].get("judge", "unknown"), "code"),
        *(count(report["cases"]), variants(report)),
        (words.mark(report["status"], report["cases"]), f", {failures(report)}"),
        tuple(links),
    )


def _dates(report: Report) -> str:
    """The day on which the first run began, and that of the last one if it is another; UTC."""
    started = [report["started"], *(run["started"] for run in report.get("runs", []))]
    days = sorted({day for one in started if (day := text.moment(one)[: len("2026-01-01")])})
    if not days:
        return text.NONE
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
