"""The files of a report's folder: what they must hold, and where they do not hold it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from verify.document import Document, Figure, Paragraph, Span, html, markdown, text
from verify.probes import page as probes
from verify.report import beside, mutation, svg
from verify.report.beside import Beside
from verify.report.document import document
from verify.report.json_file import dumps
from verify.report.schema import BesideReport, DTypeReport, Report, VariantReport
from verify.report.sections.closest import PICTURE
from verify.sanitizers import page as sanitizers
from verify.timing import page as speed

_STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)  # how a page looks says nothing
_OVER = "attention-verify · accuracy report"
_SHOWN = 100  # characters of a line that disagrees


def render(report: Report, folder: Path) -> dict[str, str]:
    """The content of every file of the report by name, report.json first, with what lies in the
    folder beside it; and the pages of that.

    The words of a kernel may be anything: where a page cannot be made, it says why, and report.json
    has everything.
    """
    near = beside.look(folder, report["device"])
    whole = beside.joined(mutation.scored(report), near)
    files = {"report.json": dumps(whole)}
    page = _made(partial(document, whole, near), "Attention accuracy", "report.json")
    files["report.md"] = _rendered(
        page, "report.json", partial(markdown.render, rest="report.html and report.json")
    )
    files["report.html"] = _rendered(page, "report.json", partial(html.render, over=_OVER))
    with suppress(Exception):  # a picture is worth less than the report
        for figure in page.blocks(Figure):
            if figure.name == PICTURE and figure.svg is not None:
                files["r.svg"] = figure.svg.replace('style="', 'style="background: white; ', 1)
    return files | _pages_beside(near)


def _pages_beside(near: Beside) -> dict[str, str]:
    """The pages of what lies beside a report, made of it."""
    made: dict[str, tuple[Callable[[], Document], str]] = {}
    if near.probes is not None:
        made["probes"] = (partial(probes.document, near.probes), "Probes")
    if near.sanitizer is not None:
        made["sanitizer"] = (partial(sanitizers.document, near.sanitizer), "Sanitizers")
    if near.bench is not None:
        made["bench"] = (partial(speed.document, near.bench), "Speed")
    return {
        f"{name}.md": _rendered(
            _made(make, title, f"{name}.json"),
            f"{name}.json",
            partial(markdown.render, rest=f"{name}.json"),
        )
        for name, (make, title) in made.items()
    }


def _made(make: Callable[[], Document], title: str, source: str) -> Document:
    """That document, or one that says why it could not be made."""
    try:
        return make()
    except Exception as error:  # no error of a page may cost the report
        return _no_page(title, error, source)


def _rendered(page: Document, source: str, render: Callable[[Document], str]) -> str:
    try:
        return render(page)
    except Exception as error:
        return render(_no_page(page.title, error, source))


def _no_page(title: str, error: Exception, source: str) -> Document:
    why = f": {type(error).__name__}: {error}. {source} has everything."
    return Document(title, (Paragraph((Span("This page could not be made", "strong"), why)),), ())


def disagreements(report: Report, folder: Path) -> list[str]:
    """One line for every way in which a folder contradicts its report.json: the report itself, what
    lies beside it, its pages and the pages of what lies beside it.

    Pictures compare by the data that they show, and colours do not count.  A page that is not there
    contradicts nothing.
    """
    found = [f"report.json: {said}" for said in (*_sums(report), *_beside(report, folder))]
    for name, wanted in ({"r.svg": ""} | render(report, folder)).items():
        path = folder / name
        if name == "report.json" or not path.exists():
            continue
        try:
            there = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            found.append(f"{name}: cannot be read: {error}")
            continue
        found += [f"{name}, {said}" for said in _difference(there, wanted)]
    return found


def _difference(there: str, wanted: str) -> Iterator[str]:
    """Where the first line is that differs, and what it should be."""
    # What no encoding holds was written as its escape.
    wanted = wanted.encode("utf-8", "backslashreplace").decode("utf-8")
    lines = [
        _STYLE.sub("<style>", svg.without_pictures(page)).splitlines() for page in (there, wanted)
    ]
    most = max(map(len, lines))
    old, new = ([*part, *[""] * (most - len(part))] for part in lines)
    differing = [number for number in range(most) if old[number] != new[number]]
    if differing:
        at = differing[0]
        has, should = (text.shorter(text.one_line(part[at]), _SHOWN) for part in (old, new))
        more = f" (and {len(differing) - 1} lines more)" if len(differing) > 1 else ""
        yield (
            f"line {at + 1}: has {has!r}, but report.json and what lies beside it make"
            f" {should!r}{more}"
        )


def _beside(report: Report, folder: Path) -> Iterator[str]:
    joined = beside.joined(report, beside.look(folder, report["device"]))
    told, wanted = (
        {entry["name"]: entry for entry in one.get("beside", [])} for one in (report, joined)
    )
    for name in sorted(told.keys() | wanted.keys()):
        has, should = told.get(name), wanted.get(name)
        if has != should:
            file = beside.FILES.get(name, name)
            yield f"says {_said(has)} of {file}, but the file beside it makes {_said(should)}"
    if report["status"] != joined["status"]:
        yield (
            f"is {report['status']}, but its variants and what lies beside it make"
            f" {joined['status']}"
        )


def _said(entry: BesideReport | None) -> str:
    return (
        "nothing"
        if entry is None
        else f"{entry['status']}, {text.shorter(text.one_line(entry['said']), _SHOWN)!r}"
    )


def _sums(report: Report) -> Iterator[str]:
    """Where a report contradicts itself: counts that do not add up, and a status that hides a
    failure."""
    if _counts([report]) != _counts(report["variants"]):
        yield f"{_counted(report)} are not the sums of its variants'"
    for variant in report["variants"]:
        if _counts([variant]) != _counts(variant["dtypes"]):
            yield f"{variant['ref']}: {_counted(variant)} are not the sums of its dtypes'"
        red = [dtype["dtype"] for dtype in variant["dtypes"] if dtype["status"] == "red"]
        if variant["status"] != "red" and (red or variant["failing"]):
            yield f"{variant['ref']} is {variant['status']}, but {', '.join(red) or 'a case'} fails"
        for dtype in variant["dtypes"]:
            yield from _hidden(variant, dtype)


def _counts(parts: Sequence[Report | VariantReport | DTypeReport]) -> tuple[int, int]:
    return sum(part["cases"] for part in parts), sum(part["failures"] for part in parts)


def _counted(part: Report | VariantReport) -> str:
    return f"{part['cases']} cases and {part['failures']} failing"


def _hidden(variant: VariantReport, dtype: DTypeReport) -> Iterator[str]:
    """Failures of a dtype that is not red: what its own numbers say."""
    if dtype["status"] == "red":
        return
    if dtype["failures"]:
        yield (
            f"{variant['ref']}, {dtype['dtype']} is {dtype['status']}, but {dtype['failures']}"
            " cases fail"
        )
    for name, tensor in dtype["tensors"].items():
        if not tensor["worst"]["r"] <= 1:
            r = text.ratio(tensor["worst"]["r"])
            yield (
                f"{variant['ref']}, {dtype['dtype']} is {dtype['status']}, but the worst r of"
                f" {name} is {r}"
            )
