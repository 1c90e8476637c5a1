"""How sharply a plain function could be judged: by what the oracle `kept_scores` saw of its
scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from verify.evidence import Verdict
from verify.report.campaign_schema import ScoresReport
from verify.report.schema import DTypeReport, VariantReport

_ORACLE = "kept_scores"
WITHIN, ROUNDED, UNDECIDED = "within", "rounded", "undecided"
"""Words of the oracle, `verify.oracles.kept_scores`."""


def scores(verdicts: Iterable[Verdict]) -> ScoresReport | None:
    """What the counted cases of one dtype say; None if none was asked."""
    asked = [v for v in verdicts if v.oracle == _ORACLE and v.counted and "scores" in v.observed]
    if not asked:
        return None
    words = Counter(v.observed["scores"] for v in asked)
    found: ScoresReport = {
        "cases": len(asked),
        "rounded": words[ROUNDED],
        "undecided": words[UNDECIDED],
    }
    beyond = [v for v in asked if v.observed["scores"] == UNDECIDED]
    if beyond:
        worst = max(beyond, key=lambda v: (_ratio(v), v.case))
        found |= {"r": _ratio(worst), "case": worst.case}
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
