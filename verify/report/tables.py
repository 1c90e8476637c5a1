"""Tables that the Markdown and the HTML rendering share: what stands in them, not how they look."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

from verify.problem import Problem, ProblemError
from verify.report import text
from verify.report.schema import (
    TENSORS,
    BuildsReport,
    Distribution,
    DTypeReport,
    Oracle,
    Report,
    VariantReport,
    WorstCase,
)
from verify.report.statistics import badness
from verify.variant.numerics import leaves

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


def device_rows(report: Report) -> list[tuple[str, str]]:
    """(label, text) of the fingerprint and of the versions recorded beside it."""
    device, versions = report["device"], report["versions"]
    told = {key: item for key, item in device.items() if item is not None and key not in versions}
    rows = [(name, text.value(told[key])) for key, name in _DEVICE.items() if key in told]
    return rows + [(text.plain(name), text.plain(version)) for name, version in versions.items()]


def scope(support: dict[str, Any]) -> list[tuple[str, str]]:
    """The declared support as rows; runs of head dims as intervals, a compute capability as 8.0."""
    return [(text.plain(key), _supported(key, item)) for key, item in support.items()]


def _supported(key: str, item: Any) -> str:
    if isinstance(item, list) and item and key in ("head_dims", "capability"):
        return text.intervals(item) if key == "head_dims" else ".".join(map(text.value, item))
    return text.value(item)


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


class Closest(NamedTuple):
    """The worst r of a variant.  where: the element, in its tensor's logical shape ("O[0, 3, 17,
    5]"), or the tensor alone."""

    ref: str
    dtype: str
    where: str
    case: WorstCase


def closest(report: Report) -> list[Closest]:
    """Of every variant that has an r the case with the largest, in the order of `ordered`."""
    found = []
    for variant in ordered(report):
        cases = [
            (d["dtype"], tensor["worst"])
            for d in variant["dtypes"]
            for tensor in d["tensors"].values()
        ]
        if cases:
            dtype, case = max(cases, key=lambda one: badness(one[1]["r"]))
            found.append(Closest(variant["ref"], dtype, _where(case), case))
    return found


def _where(case: WorstCase) -> str:
    name = text.TENSORS[case["tensor"]]
    try:
        p = Problem.parse(case["problem"])
    except ProblemError:
        return name
    shapes = {
        "out": p.shape_out,
        "lse": p.shape_out[:3],
        "dq": p.shape_q,
        "dk": p.shape_k,
        "dv": p.shape_v,
    }
    shape, flat = shapes[case["tensor"]], case["index"]
    if flat is None or not 0 <= flat < math.prod(shape):
        return name
    place = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        place.append(at)
    return f"{name}[{', '.join(map(str, reversed(place)))}]"


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


def grouped(left: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """(reason, names) of (name, reason): one entry per reason."""
    found: dict[str, list[str]] = {}
    for name, reason in left:
        found.setdefault(reason, []).append(name)
    return list(found.items())


def tensors_in(dtypes: Iterable[DTypeReport]) -> list[str]:
    """The tensors that any of these has an r of, in the order of TENSORS."""
    found = {name for d in dtypes for name in d["tensors"]}
    return [name for name in TENSORS if name in found]


def oracles_of(report: DTypeReport) -> list[Oracle]:
    """Its oracles: the failing first, then those that measured something, then the others.

    Of an oracle in several groups that has nothing but counts to show, one row with their sums: a
    case is of one group.
    """
    rows: list[Oracle] = []
    counted: dict[str, list[Oracle]] = defaultdict(list)
    for one in report["oracles"]:
        plain = not (one["failures"] or one["tensors"] or one["lse_ulp"] or one["bound_ratio"])
        (counted[one["oracle"]] if plain else rows).append(one)
    for found in counted.values():
        group = found[0]["group"] if len(found) == 1 else f"{len(found)} groups"
        cases, inapplicable = sum(o["cases"] for o in found), sum(o["inapplicable"] for o in found)
        rows.append({**found[0], "group": group, "cases": cases, "inapplicable": inapplicable})
    return sorted(
        rows, key=lambda one: (not one["failures"], not one["tensors"], one["oracle"], one["group"])
    )


def tensors_of(report: Report) -> list[str]:
    """The tensors that anything was measured of; O and LSE if nothing was."""
    return tensors_in(d for variant in report["variants"] for d in variant["dtypes"]) or list(
        TENSORS[:2]
    )


def worst_of(report: DTypeReport) -> list[tuple[str, WorstCase]]:
    """(title, case) of the worst case of every tensor; one entry for those that are worst in the
    same run."""
    cases = [report["tensors"][name]["worst"] for name in tensors_in([report])]
    runs: dict[tuple[str, str], list[WorstCase]] = {}
    for case in cases:
        runs.setdefault((case["case"], case["oracle"]), []).append(case)
    return [(_worst_title(found), found[0]) for found in runs.values()]


def _worst_title(found: list[WorstCase]) -> str:
    said = " and ".join(
        f"worst {text.TENSORS[one['tensor']]}, r = {text.ratio(one['r'])}" for one in found
    )
    return said[0].upper() + said[1:]


BUILD_COLUMNS = (
    *("variant", "arch", "builds", "failing", "registers", "shared, B", "stack, B"),
    *("spilling", "worst spill: stores + loads, B", "in build"),
)


def build_rows(report: Report) -> list[tuple[str, ...]]:
    """One row per variant and architecture under BUILD_COLUMNS; the variant's name stands in its
    first row alone."""
    return [
        _build_row(v["ref"] if i == 0 else "", b)
        for v in ordered(report)
        for i, b in enumerate(v["builds"])
    ]


def _build_row(ref: str, b: BuildsReport) -> tuple[str, ...]:
    builds = (
        f"{b['builds']}" if b["compiled"] == b["builds"] else f"{b['compiled']} of {b['builds']}"
    )
    worst = (
        f"{text.count(b['spill_stores'])} + {text.count(b['spill_loads'])}"
        if b["spilling"]
        else text.NONE
    )
    largest = (text.count(b["registers"]), text.count(b["shared"]), text.count(b["stack"]))
    return (
        ref,
        b["arch"],
        builds,
        str(len(b["failing"])),
        *largest,
        str(b["spilling"]),
        worst,
        b["spill_build"],
    )


def broken_builds(report: Report) -> list[tuple[str, BuildsReport]]:
    """(variant, builds) for every variant and architecture where some build does not compile."""
    return [(v["ref"], b) for v in ordered(report) for b in v["builds"] if b["failing"]]


def not_built(report: Report) -> str:
    """In words, of which variants no build is on record, and why where that is known; empty if
    there are none."""
    if not any(variant["builds"] for variant in report["variants"]):
        return (
            "Nothing was compiled in this run: registers, shared memory and spills are not known."
        )
    names = [
        variant["ref"] + (f" ({variant['unavailable']})" if variant["unavailable"] else "")
        for variant in ordered(report)
        if not variant["builds"]
    ]
    return f"No build is on record of {', '.join(names)}." if names else ""


def histogram(found: Distribution) -> list[tuple[str, int]]:
    """(interval, cases), without the empty intervals at the upper end."""
    edges = [text.number(edge) for edge in found["edges"]]
    names = [f"≤ {edges[1]}", *(f"{a} to {b}" for a, b in pairwise(edges[1:-1])), f"> {edges[-2]}"]
    pairs = list(zip(names, found["histogram"], strict=True))
    while pairs and not pairs[-1][1]:
        pairs.pop()
    return pairs
