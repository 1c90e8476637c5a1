"""The files of a report's folder: what they must hold, and where they do not hold it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path

from verify.report import beside, html, markdown, plots, svg, text
from verify.report.beside import Beside
from verify.report.schema import BesideReport, DTypeReport, Report, VariantReport, dumps

_STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)  # how a page looks says nothing
_SHOWN = 100  # characters of a line that disagrees


def render(report: Report, folder: Path) -> dict[str, str]:
    """The content of every file of the report by name, report.json first, with what lies in the
    folder beside it; and the pages of that.

    The words of a kernel may be anything: where a page cannot be made, it says why, and report.json
    has everything.
    """
    near = beside.look(folder, report["device"])
    whole = beside.joined(report, near)
    files = {"report.json": dumps(whole)}
    picture: str | None = None

    def drawn() -> str:
        nonlocal picture
        picture = plots.ratio_plot(whole)
        return (
            "" if picture is None else picture.replace('style="', 'style="background: white; ', 1)
        )

    files["r.svg"] = _safely(drawn, _no_picture)
    files["report.md"] = _safely(
        lambda: markdown.render(whole, near),
        partial(_no_markdown, "Attention accuracy", "report.json"),
    )
    files["report.html"] = _safely(lambda: html.render(whole, near, picture), _no_page)
    files |= _pages_beside(near)
    return {name: content for name, content in files.items() if content}


def _pages_beside(near: Beside) -> dict[str, str]:
    """The pages of what lies beside a report, made of it."""
    made: dict[str, tuple[str, str, Callable[[], str]]] = {}
    if near.probes is not None:
        from verify.probes import rendering  # needs what probes need, which no other report does

        made["probes.md"] = ("Probes", "probes.json", partial(rendering.markdown, near.probes))
    if near.sanitizer is not None:
        from verify.sanitizers import page

        made["sanitizer.md"] = (
            "Sanitizers",
            "sanitizer.json",
            partial(page.markdown, near.sanitizer),
        )
    found = {}
    for name, (title, source, make) in made.items():
        found[name] = _safely(make, partial(_no_markdown, title, source))
    return found


def _safely(make: Callable[[], str], instead: Callable[[str], str]) -> str:
    try:
        return make()
    except Exception as error:  # whatever it is, it must not cost the report
        return instead(text.one_line(f"{type(error).__name__}: {error}"))


def _no_picture(why: str) -> str:
    return ""


def _no_markdown(title: str, source: str, why: str) -> str:
    said = f"**This page could not be made**: {text.markdown(why)}. {source} has everything."
    return f"# {title}\n\n{said}\n"


def _no_page(why: str) -> str:
    said = (
        f"<p><strong>This page could not be made</strong>: {escape(why)}. report.json has"
        " everything.</p>"
    )
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Attention'
        f" accuracy</title>{said}</html>\n"
    )


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
