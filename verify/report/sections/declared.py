"""Declarations: contract and numerics of all variants, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from verify.document import Block, Heading, Paragraph, Row, Section, Span, Table, text
from verify.report.beside import Beside
from verify.report.schema import Report
from verify.variant.numerics import leaves

ORDER = 130


def section(report: Report, beside: Beside) -> Section | None:
    """What all declare alike in one line, and the rest as a table, of each kind."""
    blocks = tuple(block for one in declarations(report) for block in _blocks(one))
    return Section("Declarations", "declared", blocks) if blocks else None


def _blocks(one: Declared) -> Iterator[Block]:
    yield Heading(one.title)
    if one.alike:
        said = "; ".join(f"{term.replace('_', ' ')}: {word}" for term, word in one.alike)
        yield Paragraph((Span(one.whose, "strong"), f": {said}."), note=True)
    if one.terms:
        rows: list[Row] = [(Span(ref, "strong"), *cells) for ref, cells in one.rows]
        yield Table(("variant", *(term.replace("_", " ") for term in one.terms)), tuple(rows))


class Declared(NamedTuple):
    """What variants declare of one kind.  alike: (term, text) of terms that all declare alike;
    rows: of the other `terms`, by variant."""

    title: str
    alike: list[tuple[str, str]]
    terms: list[str]
    rows: list[tuple[str, list[str]]]

    @property
    def whose(self) -> str:
        """Of whom `alike` is said."""
        return self.rows[0][0] if len(self.rows) == 1 else "All alike"


def declarations(report: Report) -> list[Declared]:
    """What variants declare, side by side.

    A variant without a forward has the numerics of whatever saves O and LSE for it, which are not
    repeated here.
    """
    found, variants = [], report["variants"]
    for title, declared in (
        ("Declared contract", [(v["ref"], v["contract"]) for v in variants]),
        (
            "Declared numerics",
            [(v["ref"], leaves(v["numerics"])) for v in variants if "forward" in v["entries"]],
        ),
        (
            "Declared numerics of gradients",
            [(v["ref"], leaves(v["gradients"])) for v in variants if v["gradients"] is not None],
        ),
    ):
        if declared:
            found.append(_declared(title, declared))
    return found


def _declared(title: str, declared: list[tuple[str, dict[str, Any]]]) -> Declared:
    texts = {
        term: [text.value(one[term]) if term in one else text.NONE for _, one in declared]
        for term in dict.fromkeys(term for _, one in declared for term in one)
    }
    alike = [(text.plain(term), said[0]) for term, said in texts.items() if len(set(said)) == 1]
    differing = {text.plain(term): said for term, said in texts.items() if len(set(said)) > 1}
    rows = [
        (ref, [said[place] for said in differing.values()])
        for place, (ref, _) in enumerate(declared)
    ]
    return Declared(title, alike, list(differing), rows)
