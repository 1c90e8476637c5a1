"""Variants: every oracle of every dtype, the spread of its measures, and the worst cases."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from verify import document as doc
from verify.document import text
from verify.report import plots, replays, words
from verify.report.beside import Beside
from verify.report.schema import (
    Distribution,
    DTypeReport,
    Oracle,
    Report,
    VariantReport,
    WorstCase,
)
from verify.report.sections.verdicts import MEASURED, measures, ratios, tally
from verify.report.states import marks
from verify.report.tables import ordered, tensors_in

ORDER = 110
_CAPTION = (
    "Marks: the largest error of a case, of 40 cases of each tensor. Dashes: the bound at that"
    " element. Both against the number of keys; what is below 1e-10 of the largest stands at the"
    " lower edge."
)
_SPREAD = ("measure", "cases", "least", "median", "90 %", "99 %", "worst", "by powers of two")
_BARS = "▁▂▃▄▅▆▇█"


def section(report: Report, beside: Beside) -> doc.Section:
    """Every variant, folded."""
    blocks = tuple(_variant(v, f"v{place}") for place, v in enumerate(ordered(report)))
    return doc.Section("Variants", "variants", blocks, detail=True)


def _variant(variant: VariantReport, key: str) -> doc.Folded:
    about = [variant["family"], " and ".join(variant["entries"])]
    about += ["undeclared"] if variant["undeclared"] else []
    about += [f"{variant['cases']} cases"] if variant["cases"] else []
    summary: list[doc.Inline] = [
        *(doc.Span(variant["ref"], "strong"), " ", words.mark(variant["status"], variant["cases"])),
        *(" ", doc.Span(" · ".join(about), "soft")),
    ]
    for name in marks(variant):
        summary += [", ", doc.Span(name, "warn")]
    blocks: list[doc.Block] = [doc.List(tuple(variant["reasons"]))] if variant["reasons"] else []
    blocks.append(doc.Figure(key, _CAPTION, partial(plots.error_plot, variant, key)))
    blocks += [block for d in variant["dtypes"] if d["cases"] for block in _dtype(d)]
    if variant["support"]:
        further = variant.get("further_configs", 0)
        names = [*variant["configs"], *([f"{further} more, not judged"] if further else [])]
        declared = (*scope(variant["support"]), ("configs", ", ".join(names)))
        blocks.append(doc.Folded("Declared support and configs", (doc.Terms(declared),)))
    return doc.Folded(tuple(summary), tuple(blocks))


def _dtype(d: DTypeReport) -> Iterator[doc.Block]:
    yield doc.Heading((d["dtype"], " ", words.mark(d["status"], d["cases"])))
    tensors = tensors_in([d])
    spreads: dict[str, Distribution | None] = {f"r_{n}": d["tensors"][n]["r"] for n in tensors}
    others: dict[str, Distribution | None] = {
        "lse_ulp": d["lse_ulp"],
        "bound_ratio": d["bound_ratio"],
    }
    names = [name for name, found in others.items() if found is not None]
    titles = [*(words.MEASURES[name] for name in spreads), *(MEASURED[name][0] for name in names)]
    rows = [_oracle(o, tensors, names) for o in oracles_of(d)]
    yield doc.Table(("oracle", "group", "cases", "not applicable", *titles), tuple(rows))
    reasons = tuple(_reasons(d))
    if reasons:
        yield doc.Folded("Why oracles were not applicable", (doc.List(reasons),))
    spreads |= others
    cells = tuple(_spread(words.MEASURES[key], f) for key, f in spreads.items() if f is not None)
    if cells:
        yield doc.Table(_SPREAD, cells)
    for title, worst in worst_of(d):
        config = doc.Span(worst["config"], "code")
        yield doc.Paragraph((f"{title}, {worst['oracle']}, config ", config, ":"), note=True)
        yield doc.Code(replays.command(worst), "sh")
    yield doc.Paragraph(tuple(_coverage(d)), note=True)
    if d["bins"]:
        bins = ", ".join(f"{name} {cases}" for name, cases in sorted(d["bins"].items()))
        yield doc.Folded("Cases per coverage bin", (doc.Paragraph(bins, note=True),))
    if d["seconds"]:
        steps = ", ".join(
            f"{step} {text.seconds(t['median'])} (at most {text.seconds(t['maximum'])}, in all"
            f" {text.seconds(t['total'])})"
            for step, t in d["seconds"].items()
        )
        yield doc.Paragraph(f"Time per case: {steps}.", note=True)


def _oracle(o: Oracle, tensors: Sequence[str], names: Sequence[str]) -> doc.Row:
    counts = tally(o), doc.Number(o["inapplicable"])
    return (
        o["oracle"],
        doc.Span(o["group"], "soft"),
        *counts,
        *ratios(o.get("r", {}), tensors),
        *measures(o, names),
    )


def _reasons(d: DTypeReport) -> Iterator[str]:
    """One line for each oracle and reason; one for an oracle that has it in several groups."""
    told: Counter[tuple[str, str]] = Counter()
    for one in d["oracles"]:
        for reason, cases in one.get("reasons", {}).items():
            told[one["oracle"], reason] += cases
    for (oracle, reason), cases in sorted(told.items()):
        yield f"{oracle}: {reason} ({cases} case{'s' * (cases != 1)})"


def _spread(name: str, found: Distribution) -> doc.Row:
    levels = (found["minimum"], found["median"], found["p90"], found["p99"], found["maximum"])
    return name, doc.Number(found["count"]), *map(doc.Number, levels), _bars(found["histogram"])


def _bars(counts: list[int]) -> str:
    """A histogram, each bar a letter; none above the largest that occurs."""
    most = max(counts, default=0) or 1
    bars = [_BARS[-(-count * (len(_BARS) - 1) // most)] for count in counts]
    return "".join(bars[: max((at + 1 for at, count in enumerate(counts) if count), default=0)])


def _coverage(d: DTypeReport) -> Iterator[doc.Inline]:
    yield f"Coverage: {len(d['bins'])} bins filled"
    if "pairs_met" in d:
        yield f", {d['pairs_met']} pairs of levels met"
    if d["bins_missing"]:
        yield "; "
        yield doc.Span(f"empty: {', '.join(d['bins_missing'])}", "strong")
    refused = [g for g in d["groups"] if g["refused"]]
    if refused:
        shares = (f"{g['group']} {text.share(g['refused'], g['drawn'])}" for g in refused)
        yield f". Refused of the problems drawn: {', '.join(shares)}."
    else:
        yield f". Of {d['drawn']:,} problems drawn none was refused." if d["drawn"] else "."


def scope(support: dict[str, Any]) -> list[tuple[str, str]]:
    """The declared support as rows; runs of head dims as intervals, a compute capability as 8.0."""
    return [(text.plain(key), _supported(key, item)) for key, item in support.items()]


def _supported(key: str, item: Any) -> str:
    if isinstance(item, list) and item and key in ("head_dims", "capability"):
        return text.intervals(item) if key == "head_dims" else ".".join(map(text.value, item))
    return text.value(item)


def oracles_of(report: DTypeReport) -> list[Oracle]:
    """Its oracles: the failing first, then those that measured something, then the others.

    Of an oracle in several groups that has nothing but counts to show, one row with their sums: a
    case is of one group.
    """
    rows: list[Oracle] = []
    counted: dict[str, list[Oracle]] = defaultdict(list)
    for one in report["oracles"]:
        measured = one.get("r") or one.get("lse_ulp") or one.get("bound_ratio")
        plain = not (one["failures"] or measured)
        (counted[one["oracle"]] if plain else rows).append(one)
    for found in counted.values():
        group = found[0]["group"] if len(found) == 1 else f"{len(found)} groups"
        cases, inapplicable = sum(o["cases"] for o in found), sum(o["inapplicable"] for o in found)
        rows.append({**found[0], "group": group, "cases": cases, "inapplicable": inapplicable})
    return sorted(
        rows, key=lambda one: (not one["failures"], not one.get("r"), one["oracle"], one["group"])
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
        f"worst {words.TENSORS[one['tensor']]}, r = {text.ratio(one['r'])}" for one in found
    )
    return said[0].upper() + said[1:]
