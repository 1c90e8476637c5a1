"""The contract matrix: every measured property of every variant, side by side, against what it
declares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from verify.evidence import Verdict
from verify.report import text
from verify.report.schema import Cell

_ORACLES = ("contract", "contract_backward", "declared_numerics")
_TITLE = "Measured contracts"
_ABOUT = (
    "What raw outputs show on problems designed for it, whatever is declared; the declaration"
    " follows where its words differ. A contradiction is a failing verdict. Dtypes stand behind"
    " words that do not hold for all of a variant's; several words without dtypes were found on"
    " several problems. causal.tl, window.tl: masks aligned to the top left. –: not measured."
)


def cells(verdicts: Iterable[Verdict]) -> dict[str, Cell]:
    """The properties of one variant by name, sorted, from its verdicts; the counted ones alone."""
    found: dict[str, Cell] = {}
    telling = [v for v in verdicts if v.observed and v.oracle in _ORACLES and v.counted]
    for verdict in sorted(telling, key=lambda v: (v.case, v.oracle)):
        for name, word in verdict.observed.items():
            item, _, kind = name.partition(":")
            cell = found.setdefault(item, Cell(measured={}, declared={}, contradicts=""))
            if kind == "contradicts":
                cell["contradicts"] = cell["contradicts"] or word
            else:
                words = cell["declared"] if kind else cell["measured"]
                words[word] = sorted({*words.get(word, []), verdict.dtype})
    return dict(sorted(found.items()))


def columns(measured: Mapping[str, Mapping[str, Cell]]) -> list[str]:
    """The variants of which anything was measured, in their order."""
    return [ref for ref, found in measured.items() if found]


class Words(NamedTuple):
    """What a cell shows.  declared: where its words are not those that were measured."""

    measured: str
    declared: str
    contradicts: bool


def rows(measured: Mapping[str, Mapping[str, Cell]]) -> list[tuple[str, list[Words]]]:
    """(property, words per variant of `columns`), by property."""
    names = sorted(
        {name for found in measured.values() for name in found},
        key=lambda name: (name.lower(), name),
    )
    refs = columns(measured)
    return [(name, [_cell(measured[ref].get(name)) for ref in refs]) for name in names]


def _cell(cell: Cell | None) -> Words:
    if cell is None:
        return Words(text.NONE, "", False)
    said, declared = _words(cell["measured"]), _words(cell["declared"])
    return Words(said, declared if declared != said else "", bool(cell["contradicts"]))


def _words(found: Mapping[str, list[str]]) -> str:
    everywhere = {dtype for dtypes in found.values() for dtype in dtypes}
    return "; ".join(
        (
            word
            if set(dtypes) == everywhere or word == ", ".join(dtypes)
            else f"{word} ({', '.join(dtypes)})"
        )
        for word, dtypes in found.items()
    )


def markdown(measured: Mapping[str, Mapping[str, Cell]]) -> Iterator[str]:
    """The matrix as lines of Markdown; nothing if nothing was measured."""
    refs = columns(measured)
    if not refs:
        return
    yield f"\n## {_TITLE}\n"
    yield _ABOUT
    yield ""
    yield "| property | " + " | ".join(text.markdown(ref) for ref in refs) + " |"
    yield "|" + " --- |" * (len(refs) + 1)
    for name, found in rows(measured):
        yield f"| **{text.markdown(name)}** | " + " | ".join(map(_markdown, found)) + " |"


def _markdown(words: Words) -> str:
    said = text.markdown(
        words.measured + (f" [declared: {words.declared}]" if words.declared else "")
    )
    return f"❌ **{said}**" if words.contradicts else said


def html(measured: Mapping[str, Mapping[str, Cell]]) -> Markup:
    """The matrix as a section of the page, every text escaped; empty if nothing was measured."""
    refs = columns(measured)
    if not refs:
        return Markup()
    head = Markup().join(Markup("<th>{}</th>").format(_clean(ref)) for ref in refs)
    body = Markup().join(
        Markup("<tr><th>{}</th>{}</tr>").format(_clean(name), Markup().join(map(_data, found)))
        for name, found in rows(measured)
    )
    table = Markup(
        '<div class="scroll"><table'
        ' class="matrix"><thead><tr><th>property</th>{}</tr></thead><tbody>{}</tbody></table></div>'
    )
    return Markup('<h2 id="contracts">{}</h2><p class="soft">{}</p>').format(
        _TITLE, _ABOUT
    ) + table.format(head, body)


def _data(words: Words) -> Markup:
    declared = (
        Markup('<span class="wanted">declared: {}</span>').format(_clean(words.declared))
        if words.declared
        else ""
    )
    return Markup('<td class="{}">{}{}</td>').format(
        "bad" if words.contradicts else "", _clean(words.measured), declared
    )


def _clean(value: Any) -> Markup:
    return escape(text.plain(str(value)))
