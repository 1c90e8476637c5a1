"""How sharply a plain function could be judged: by what the oracle `kept_scores` saw of its
scores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from verify.evidence import Verdict, Verdicts
from verify.evidence.columns import all_blocks
from verify.report.campaign_schema import ScoresReport
from verify.report.schema import DTypeReport, VariantReport

_ORACLE = "kept_scores"
WITHIN, ROUNDED, UNDECIDED = "within", "rounded", "undecided"
"""Words of the oracle, `verify.oracles.kept_scores`."""


def scores(verdicts: Iterable[Verdict]) -> ScoresReport | None:
    """What the counted cases of one dtype say; None if none was asked."""
    asked = Verdicts.of(verdicts).where(
        lambda shape, said: shape.counted and said.oracle == _ORACLE
    )
    words: Counter[str] = Counter()
    worst: tuple[float, str] = (-math.inf, "")
    for block in all_blocks(asked):
        for row, observed in block.observed:
            if "scores" in observed:
                words[observed["scores"]] += 1
            if observed.get("scores") == UNDECIDED:
                verdict = block.verdict(row)
                worst = max(worst, (_ratio(verdict), verdict.case))
    if not words:
        return None
    found: ScoresReport = {
        "cases": words.total(),
        "rounded": words[ROUNDED],
        "undecided": words[UNDECIDED],
    }
    if words[UNDECIDED]:
        found |= {"r": worst[0], "case": worst[1]}
    return found


def _ratio(verdict: Verdict) -> float:
    return max(verdict.measures.get(f"sharper_{name}", 0.0) for name in ("out", "lse"))


def judged_as(variant: VariantReport) -> str:
    """By which arithmetic each dtype of a plain function was judged, in words."""
    said: dict[str, list[str]] = {}
    for dtype, found in _asked(variant):
        cases = f"{found['cases']} case{'s' * (found['cases'] != 1)}"
        if found["rounded"]:
            words = f"scores are rounded in {found['rounded']} of {cases}"
        elif not found["undecided"]:
            words = _sharper(dtype)
        else:
            words = f"{found['undecided']} of {cases} exceed {_sharper(dtype)}"
        said.setdefault(words, []).append(dtype)
    return "; ".join(f"{' and '.join(dtypes)}: {words}" for words, dtypes in said.items())


def unexplained(variant: VariantReport) -> Iterator[str]:
    """Each dtype of which a case exceeds the sharper arithmetic while no case shows the roundings
    that would explain it."""
    for dtype, found in _asked(variant):
        if found["undecided"] and not found["rounded"]:
            yield (
                f"{found['undecided']} of {found['cases']} cases exceed {_sharper(dtype)}"
                f" ({dtype}), and no launch shows that scores are rounded: further roundings,"
                f" another code path or a fault; r = {found['r']:.3g} in {found['case']}"
            )


def _sharper(dtype: str) -> str:
    """The arithmetic of the oracle's bounds, in words."""
    return f"fp32 scores, P in {dtype}, fp32 accumulators"


def _asked(variant: VariantReport) -> Sequence[tuple[str, ScoresReport]]:
    dtypes: list[DTypeReport] = variant["dtypes"]
    return [(d["dtype"], d["scores"]) for d in dtypes if "scores" in d]
