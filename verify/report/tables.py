"""What several sections ask of a report: variants in order, why one is not green, sums."""

from __future__ import annotations

from collections.abc import Iterable

from verify.report.schema import TENSORS, BuildsReport, DTypeReport, Report, VariantReport

_ORDER = {"red": 0, "grey": 1, "green": 2}


def build_counts(builds: Iterable[BuildsReport]) -> tuple[int, int]:
    """How many builds were given to a compiler, and how many of them failed."""
    pairs = [(b["compiled"] + len(b["failing"]), len(b["failing"])) for b in builds]
    return sum(tried for tried, _ in pairs), sum(broken for _, broken in pairs)


def ordered(report: Report) -> list[VariantReport]:
    """Variants, the failing first, then the incomplete, then the passing, then those not run."""
    return sorted(
        report["variants"],
        key=lambda v: (not v["cases"] and v["status"] == "grey", _ORDER[v["status"]], v["ref"]),
    )


def why(variant: VariantReport) -> str:
    """Why it is not green; what is said of every dtype alike, once."""
    found: dict[str, list[str]] = {}
    names = [d["dtype"] for d in variant["dtypes"]]
    for reason in variant["reasons"]:
        dtype = next((name for name in names if reason.startswith(f"{name}: ")), "")
        found.setdefault(reason.removeprefix(f"{dtype}: ") if dtype else reason, []).append(dtype)
    return "; ".join(
        reason if dtypes == [""] or len(dtypes) == len(names) else f"{', '.join(dtypes)}: {reason}"
        for reason, dtypes in found.items()
    )


def tensors_in(dtypes: Iterable[DTypeReport]) -> list[str]:
    """The tensors that any of these has an r of, in the order of TENSORS."""
    found = {name for d in dtypes for name in d["tensors"]}
    return [name for name in TENSORS if name in found]


def tensors_of(report: Report) -> list[str]:
    """The tensors that anything was measured of; O and LSE if nothing was."""
    return tensors_in(d for variant in report["variants"] for d in variant["dtypes"]) or list(
        TENSORS[:2]
    )
