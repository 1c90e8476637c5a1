"""The contract matrix as data: every measured property of a variant, with what it declares."""

from __future__ import annotations

from collections.abc import Iterable

from verify.evidence import Verdict, Verdicts
from verify.report.schema import Cell

_ORACLES = ("contract", "contract_backward", "declared_numerics")


def cells(verdicts: Iterable[Verdict]) -> dict[str, Cell]:
    """The properties of one variant by name, sorted, from its verdicts; the counted ones alone."""
    found: dict[str, Cell] = {}
    asked = Verdicts.of(verdicts).where(
        lambda shape, said: shape.counted and said.oracle in _ORACLES
    )
    for verdict in asked.first_with_words:
        for name, word in verdict.observed.items():
            item, _, kind = name.partition(":")
            cell = found.setdefault(item, Cell(measured={}, declared={}, contradicts=""))
            if kind == "contradicts":
                cell["contradicts"] = cell["contradicts"] or word
            else:
                words = cell["declared"] if kind else cell["measured"]
                words[word] = sorted({*words.get(word, []), verdict.dtype})
    return dict(sorted(found.items()))
