"""The page over all reports of a folder, index.md: device, date, judge, cases, variants, state and
links."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from verify.report import text
from verify.report.headline import failures, variants
from verify.report.markdown import MARKS, table
from verify.report.schema import Report, ReportError, read

NAME = "index.md"
TITLE = "# Reports"
_INTRODUCTION = """\
One folder for each device. `verify report --publish` and `verify report --render` write this page,
and `verify recheck` holds it against the reports. The date is the day on which the runs began, in
UTC; the judge is the hash of the sources that judged, one for each version that did. Known failures
are those of `xfails.toml`; they leave a report red."""
_COLUMNS = ("device", "date", "judge", "cases", "variants", "state", "report")
_CASES = _COLUMNS.index("cases")
_PAGES = ("report.md", "report.html", "report.json")


def render(parent: Path) -> str:
    """The page over the reports of `parent`, sorted by folder; a report that does not read is
    listed with the reason."""
    rows = [_row(path.parent) for path in sorted(parent.glob("*/report.json"))]
    return "\n".join([TITLE, "", _INTRODUCTION, "", *table(_COLUMNS, rows, [_CASES])]) + "\n"


def replaceable(parent: Path) -> bool:
    """Whether index.md of `parent` is missing or this page, and not a page of somebody else."""
    path = parent / NAME
    if not path.exists():
        return True
    try:
        return path.read_text(encoding="utf-8").split("\n", 1)[0] == TITLE
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


def _row(folder: Path) -> list[str]:
    links = ", ".join(f"[{name}]({quote(f'{folder.name}/{name}')})" for name in _PAGES)
    try:
        report = read(folder)
    except ReportError as error:
        reason = str(error).removeprefix(f"{folder / 'report.json'}: ")
        unknown = [text.NONE] * (len(_COLUMNS) - 3)
        return [text.markdown(folder.name), *unknown, text.markdown(reason), links]
    return [
        text.markdown(report["device"].get("name", folder.name)),
        _dates(report),
        text.code(report["versions"].get("judge", "unknown")),
        text.count(report["cases"]),
        text.markdown(variants(report)),
        f"{MARKS[report['status']]} **{text.label(report['status'], report['cases'])}**,"
        f" {failures(report)}",
        links,
    ]


def _dates(report: Report) -> str:
    """The day on which the first run began, and that of the last one if it is another; UTC."""
    started = [report["started"], *(run["started"] for run in report.get("runs", []))]
    days = sorted({day for one in started if (day := text.moment(one)[: len("2026-01-01")])})
    if not days:
        return text.NONE
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
