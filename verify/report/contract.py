"""The contract matrix as data: every measured property of a variant, with what it declares."""

from __future__ import annotations

from collections.abc import Iterable

from verify.evidence import Verdict
from verify.report.schema import Cell

_ORACLES = ("contract", "contract_backward", "declared_numerics")


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
