"""Tables that the Markdown and the HTML rendering share: what stands in them, not how they look."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

from verify.report import text
from verify.report.schema import Distribution, DTypeReport, Report, VariantReport, WorstCase

_ORDER = {"red": 0, "grey": 1, "green": 2}
_DEVICE = {
    "name": "Device",
    "capability": "Compute capability",
    "driver": "Driver",
    "cuda": "CUDA",
    "torch": "torch",
    "triton": "triton",
    "numpy": "numpy",
    "python": "Python",
    "platform": "Platform",
    "cores": "Cores",
}


def headline(report: Report) -> str:
    """One sentence: how many variants pass, fail, are incomplete or were not run, and over how many cases."""
    found = Counter(text.label(variant["status"], variant["cases"]) for variant in report["variants"])
    words = {"FAIL": "failing", "pass": "passing", "incomplete": "incomplete", "not run": "not run"}
    parts = [f"{found[key]} {word}" for key, word in words.items() if found[key]]
    total, cases, failures = len(report["variants"]), report["cases"], report["failures"]
    return f"{total} variant{'s' * (total != 1)}: {', '.join(parts) or 'none'}. {cases:,} judged cases, {failures:,} failing."


def ordered(report: Report) -> list[VariantReport]:
    """Variants, the failing first, then the incomplete, then the passing, then those not run."""
    return sorted(report["variants"], key=lambda v: (not v["cases"] and v["status"] == "grey", _ORDER[v["status"]], v["ref"]))


def device_rows(report: Report) -> list[tuple[str, str]]:
    """(label, text) of the fingerprint and of the versions recorded beside it."""
    device = report["device"]
    rows = [(name, text.value(device[key])) for key, name in _DEVICE.items() if device.get(key) is not None]
    return rows + [(text.plain(name), text.plain(version)) for name, version in report["versions"].items()]


def scope(support: dict[str, Any]) -> list[tuple[str, str]]:
    """The declared support as rows; runs of head dims as intervals."""
    return [
        (text.plain(key), intervals(item) if key == "head_dims" and isinstance(item, list) else text.value(item))
        for key, item in support.items()
    ]


def intervals(numbers: list[int]) -> str:
    """[8, 16, 24, 64] -> "8-24 by 8, 64"; [1, 2, 3] -> "1-3"."""
    found: list[tuple[int, int, int]] = []  # first, last, step
    for item in numbers:
        if found and (found[-1][2] == 0 or item - found[-1][1] == found[-1][2]) and item > found[-1][1]:
            first, last, _ = found[-1]
            found[-1] = (first, item, item - last)
        else:
            found.append((item, item, 0))
    return ", ".join(_interval(*run) for run in found)


def _interval(first: int, last: int, step: int) -> str:
    if step == 0:
        return str(first)
    if last == first + step and step > 1:
        return f"{first}, {last}"
    return f"{first}-{last}" + (f" by {step}" if step > 1 else "")


def declarations(report: Report) -> list[tuple[str, list[str], list[tuple[str, list[str]]]]]:
    """("Contract" | "Numerics", terms, rows (variant, one text per term)): what variants declare, side by side."""
    tables = []
    for title in ("contract", "numerics"):
        declared = [(v["ref"], v["contract"] if title == "contract" else v["numerics"]) for v in report["variants"]]
        terms = list(dict.fromkeys(term for _, one in declared for term in one))
        rows = [(ref, [text.value(one[t]) if t in one else text.NONE for t in terms]) for ref, one in declared]
        tables.append((title.capitalize(), [text.plain(term) for term in terms], rows))
    return tables


def worst_of(report: DTypeReport) -> list[tuple[str, WorstCase]]:
    """(title, case) of the worst cases by O and by LSE; one entry where it is the same run."""
    out, lse = report["worst_out"], report["worst_lse"]
    if out is not None and lse is not None and (out["case"], out["oracle"]) == (lse["case"], lse["oracle"]):
        return [(f"Worst O, r = {text.ratio(out['value'])}, and worst LSE, r = {text.ratio(lse['value'])}", out)]
    both = (("O", out), ("LSE", lse))
    return [(f"Worst {name}, r = {text.ratio(found['value'])}", found) for name, found in both if found is not None]


def histogram(found: Distribution) -> list[tuple[str, int]]:
    """(interval, cases), without the empty intervals at the upper end."""
    edges = [text.number(edge) for edge in found["edges"]]
    names = [f"≤ {edges[1]}", *(f"{a} to {b}" for a, b in pairwise(edges[1:-1])), f"> {edges[-2]}"]
    pairs = list(zip(names, found["histogram"], strict=True))
    while pairs and not pairs[-1][1]:
        pairs.pop()
    return pairs
