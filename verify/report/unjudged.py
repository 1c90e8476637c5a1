"""Cases that were begun and have no verdict: those that were lost, and those that were interrupted
because the run was ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from verify.brief import counted
from verify.evidence import Begin, Evidence
from verify.report.schema import Lost

LOST: Final = "launched but never judged"
INTERRUPTED: Final = "interrupted when the run was ended"


def reasons(evidence: Evidence, wanted: Callable[[str], bool]) -> list[str]:
    """In words, how many cases there are of the variants that are wanted."""
    counts = {
        LOST: sum(wanted(begin.variant) for begin in evidence.lost),
        INTERRUPTED: sum(wanted(begin.variant) for begin in evidence.interrupted),
    }
    return [f"{counted(count, 'case')} {words}" for words, count in counts.items() if count]


def is_reason(text: str) -> bool:
    """Whether a report's reason is one of `reasons`."""
    return text.endswith((LOST, INTERRUPTED))


def cases(begins: Sequence[Begin]) -> list[Lost]:
    """The cases as a report has them."""
    return [{"case": b.case, "phase": b.phase, "variant": b.variant} for b in begins]
