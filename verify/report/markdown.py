"""The report as Markdown for a forge: headline and tables, details folded, below the 1 MiB that a
step summary may have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verify.report import contract, pooled, probed, text, tight
from verify.report.beside import FILES, Beside
from verify.report.headline import headline
from verify.report.rate import NOTE as RATE_NOTE
from verify.report.rate import rate
from verify.report.schema import Distribution, DTypeReport, Failure, Oracle, Report, VariantReport
from verify.report.states import CLAIMS, GRAVE, claimed, claims, states, unjudged
from verify.report.tables import (
    BUILD_COLUMNS,
    broken_builds,
    build_counts,
    build_rows,
    declarations,
    device_rows,
    not_built,
    oracles_of,
    ordered,
    tensors_in,
    tensors_of,
    why,
    worst_of,
)

LIMIT = 1 << 20  # bytes: GitHub's limit of a step summary

MARKS = {"green": "✅", "red": "❌", "grey": "⬜"}
_WARNING = "⚠️"
_BESIDE = {"probes": "Probes of the device", "sanitizer": "Sanitizers"}
_MESSAGE = 2000  # characters of one message
_LISTED = 200  # rows of lists that a bad day makes long


def render(report: Report, beside: Beside | None = None) -> str:
    """The whole report; without the variants' details where it would pass LIMIT, then cut.

    beside: what lies beside the report, whose entries `verify.report.beside.joined` has put into
    it.
    """
    beside = beside or Beside()
    whole = "\n".join(_lines(report, beside, details=True)) + "\n"
    if len(whole.encode()) < LIMIT:
        return whole
    short = "\n".join(
        [
            *_lines(report, beside, details=False),
            "",
            "The details of the variants are in report.html and report.json.",
        ]
    )
    note = "\n\n(cut: report.json has everything)\n"
    return short.encode()[: LIMIT - len(note) - 1].decode(errors="ignore") + note


def _lines(report: Report, beside: Beside, *, details: bool) -> Iterator[str]:
    name = text.markdown(report["device"].get("name", "unknown device"))
    yield f"# Attention accuracy: {name}"
    yield ""
    yield (
        f"{MARKS[report['status']]} **{text.label(report['status'], report['cases'])}**"
        f" {text.markdown(headline(report))}"
    )
    for reason in report["reasons"]:
        yield f"\n**{text.markdown(reason)}**"
    for entry in report.get("beside", []):
        if entry["status"] != "green":
            yield (
                f"\n{MARKS[entry['status']]} **{_BESIDE[entry['name']]}:"
                f" {text.markdown(entry['said'])}**"
            )
    yield ""
    begun = f", started {moment}" if (moment := text.moment(report["started"])) else ""
    yield f"Run {text.code(report['run'])}{begun}, profile {text.code(report['profile'])}."
    cells = report["versions"].get("cells", "")
    if "not confined" in cells:
        yield f"\n**Cells: {text.markdown(cells)}** (docs/security.md)"
    yield from _verdicts(report)
    yield from _failing(report)
    yield from _tight(report)
    yield from _pools(report)
    yield from _beside(report, beside)
    yield from _builds(report)
    if details:
        yield "\n## Variants\n"
        for variant in ordered(report):
            yield from _variant(variant)
    yield from contract.markdown({v["ref"]: v.get("measured", {}) for v in ordered(report)})
    for one in declarations(report):
        yield f"\n## {one.title}\n"
        if one.alike:
            said = "; ".join(
                f"{text.markdown(term)}: {text.markdown(said)}" for term, said in one.alike
            )
            yield f"{text.markdown(one.whose)}: {said}."
            yield ""
        if one.terms:
            rows = [[_name(ref), *map(text.markdown, cells)] for ref, cells in one.rows]
            yield from table(["variant", *map(text.markdown, one.terms)], rows)
    yield from _shortcomings(report)
    yield from _device(report)


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> Iterator[str]:
    """The lines of a table of cells that are Markdown already.  right: columns of numbers."""
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "|".join(" ---: " if i in right else " --- " for i in range(len(columns))) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _name(name: str) -> str:
    return f"**{text.markdown(name)}**"


def _verdicts(report: Report) -> Iterator[str]:
    tensors = tensors_of(report)
    columns = [
        "variant",
        "dtype",
        "verdict",
        "cases",
        *_ratios(tensors),
        "LSE, ulp",
        "bound / best",
    ]
    columns += ["refused / drawn", "bins empty"]
    rows: list[list[str]] = []
    for variant in ordered(report):
        if not variant["cases"] and variant["status"] != "red":
            verdict = f"{MARKS[variant['status']]} {text.label(variant['status'], 0)}"
            reason = text.markdown(text.shorter(why(variant), 200))
            rows.append(
                [
                    _name(variant["ref"]),
                    "",
                    f"{verdict}: {reason}",
                    *[text.NONE] * (len(columns) - 3),
                ]
            )
            continue
        for place, d in enumerate(variant["dtypes"]):
            verdict = (
                f"{MARKS[d['status']]} {text.label(d['status'], d['cases'])}{_marked(variant)}"
            )
            start = [
                _name(variant["ref"]) if place == 0 else "",
                text.markdown(d["dtype"]),
                verdict,
            ]
            share, empty = text.share(d["refused"], d["drawn"]), str(len(d["bins_missing"]))
            rows.append([*start, text.tally(d), *_measures(d, tensors), share, empty])
        if variant["cases"] and variant["status"] == "grey":
            state = (
                f"{MARKS['grey']} {text.label('grey', 1)}:"
                f" {text.markdown(text.shorter(why(variant), 200))}"
            )
            rows.append(["", "", state, *[text.NONE] * (len(columns) - 3)])
        tried, broken = build_counts(variant["builds"])
        if broken:
            state = (
                f"{MARKS['red']} {text.label('red', tried)}: {broken} of {tried} fail to compile"
            )
            rows.append(["", "builds", state, *[text.NONE] * (len(columns) - 3)])
    yield "\n## Verdicts\n"
    yield from table(columns, rows, range(3, len(columns)))
    yield ""
    yield (
        "r: error of the worst element of all cases over its bound; above 1 the kernel is wrong."
        " LSE, ulp: largest error in"
    )
    yield (
        "units of fp32's last place. Bound / best: median of the variant's bounds over the tightest"
        " of that dtype. A dtype"
    )
    yield "passes when nothing fails and no required coverage bin is empty."
    yield from _claims(report)


def _marked(variant: VariantReport) -> str:
    """ ", ⚠️ **narrow**": the names of its states."""
    names = dict.fromkeys(state.name for state in states(variant))
    return "".join(f", {_WARNING} **{name}**" if name in GRAVE else f", {name}" for name in names)


def _claims(report: Report) -> Iterator[str]:
    judged = [variant for variant in ordered(report) if claimed(variant)]
    if judged:
        yield "\n## Claims\n"
        yield f"{CLAIMS} {RATE_NOTE}"
        yield ""
    for variant in judged:
        parts = [f"{_name(variant['ref'])}: {text.markdown(claims(variant))}"]
        for state in states(variant):
            said = text.markdown(state)
            parts.append(f"{_WARNING} **{said}**" if state.name in GRAVE else said)
        parts += [text.markdown(said) for said in (rate(variant), unjudged(variant)) if said]
        yield f"- {'. '.join(parts)}."


def _ratios(tensors: Sequence[str]) -> list[str]:
    """Names of the columns of `_worst`."""
    return [text.MEASURES[f"r_{name}"] for name in tensors]


def _worst(report: DTypeReport | Oracle, tensors: Sequence[str]) -> list[str]:
    found = [report["tensors"].get(name) for name in tensors]
    return [
        text.NONE if f is None else _bold(text.ratio(f["worst"]["r"]), not f["worst"]["r"] <= 1)
        for f in found
    ]


def _measures(report: DTypeReport, tensors: Sequence[str]) -> list[str]:
    ulp, ratio = report["lse_ulp"], report["bound_ratio"]
    others = ulp["maximum"] if ulp else None, ratio["median"] if ratio else None
    return [*_worst(report, tensors), *map(text.number, others)]


def _bold(shown: str, bold: bool) -> str:
    return f"**{shown}**" if bold else shown


def _failing(report: Report) -> Iterator[str]:
    failing = [(variant, failure) for variant in ordered(report) for failure in variant["failing"]]
    if failing:
        yield "\n## Failing cases\n"
        yield "The smallest case found for each variant, config and oracle."
    for variant, failure in failing[:_LISTED]:
        yield from _failure(variant, failure)
    yield from _rest(len(failing))


def _failure(variant: VariantReport, failure: Failure) -> Iterator[str]:
    cases = text.of_failing(failure)
    title = [
        _name(variant["ref"]),
        *(text.code(failure[key]) for key in ("oracle", "dtype", "config")),
    ]
    yield "\n" + " · ".join([*title, cases]) + "\n"
    if "known" in failure:
        yield f"A known defect: {text.markdown(failure['known'])}.\n"
    yield from _block(text.shorter(failure["message"], _MESSAGE))
    if failure["total"]:
        place = f" at {text.code(failure['where'])}" if failure["where"] else ""
        got, bound = (
            text.markdown(text.exact(failure["got"])),
            text.markdown(text.number(failure["bound"])),
        )
        yield (
            f"\n{text.share(failure['count'], failure['total'])} elements at fault. Worst{place}:"
            f" got {got}, bound {bound}.\n"
        )
    yield from _block(failure["replay"], "sh")


def _block(content: str, language: str = "") -> Iterator[str]:
    """A fenced block whose fence no line of the content can close."""
    lines = [text.plain(line) for line in content.splitlines()] or [""]
    fence = "`" * max(
        3, *(len(line) - len(line.lstrip("`")) + line.count("`") + 1 for line in lines)
    )
    yield fence + language
    yield from lines
    yield fence


def _builds(report: Report) -> Iterator[str]:
    yield "\n## Builds\n"
    rows = [
        [_name(ref) if ref else "", *map(text.markdown, cells), _build(name)]
        for ref, *cells, name in build_rows(report)
    ]
    if rows:
        yield (
            "Compiled without running; the largest over the builds. Registers, stack and spills per"
            " thread, shared memory per"
        )
        yield (
            "block, memory in bytes. Where few of many builds were compiled, the rest was left out."
        )
        yield ""
        yield from table(BUILD_COLUMNS, rows, range(2, 9))
    broken = broken_builds(report)
    for ref, b in broken[:_LISTED]:
        names = text.shorter(", ".join(b["failing"]), 200)
        yield f"\n{_name(ref)} · {text.code(b['arch'])} · does not compile: {text.code(names)}\n"
        yield from _block(text.shorter(b["error"], _MESSAGE))
    yield from _rest(len(broken))
    if missing := not_built(report):
        yield f"\n{text.markdown(missing)}"


def _tight(report: Report) -> Iterator[str]:
    rows = tight.rows(report)
    if rows:
        yield "\n## Tightness of the bounds\n"
        yield from table(tight.COLUMNS, rows, range(2, len(tight.COLUMNS)))
        yield ""
        yield tight.NOTE


def _pools(report: Report) -> Iterator[str]:
    rows = [
        [_name(ref) if ref else "", *map(text.markdown, cells)]
        for ref, *cells in pooled.rows(report)
    ]
    if rows:
        yield "\n## Statistics of the campaign\n"
        yield pooled.NOTE
        yield ""
        yield from table(pooled.COLUMNS, rows, range(3, 9))


def _beside(report: Report, beside: Beside) -> Iterator[str]:
    """The short form of what lies beside the report: one line each, and every disagreement of the
    probes."""
    told = {entry["name"]: entry for entry in report.get("beside", [])}
    for name, title in _BESIDE.items():
        yield f"\n## {title}\n"
        if name not in told:
            yield (
                f"{MARKS['grey']} {text.label('grey', 0)}: {text.code(FILES[name])} says nothing,"
                " or is not there."
            )
            continue
        status, said = told[name]["status"], text.markdown(told[name]["said"])
        yield (
            f"{MARKS[status]} **{text.label(status, 1)}** {said} More is in"
            f" {text.code(name + '.md')}."
        )
        if name == "probes" and beside.probes is not None:
            yield from _faults(probed.faults(beside.probes))


def _faults(faults: Sequence[probed.ProbeFault]) -> Iterator[str]:
    if faults:
        yield ""
    for fault in faults:
        parts = [
            f"{name}: measured {measured}, the table says {wanted}"
            for name, measured, wanted in fault.rows
        ]
        said = text.markdown(text.shorter("; ".join([*parts, *fault.notes]), _MESSAGE))
        yield (
            f"- {MARKS[fault.status]} **{text.markdown(fault.name)}**: {said}. Entry:"
            f" {text.code(fault.entry)}"
        )


def _build(name: str) -> str:
    return text.code(name) if name else text.NONE


def _variant(variant: VariantReport) -> Iterator[str]:
    state = f"{MARKS[variant['status']]} {text.label(variant['status'], variant['cases'])}"
    entries = text.markdown(" and ".join(variant["entries"]))
    yield f"<details><summary>{text.markdown(variant['ref'])} ({entries}) {state}</summary>\n"
    for reason in variant["reasons"]:
        yield f"- {text.markdown(reason)}"
    for d in variant["dtypes"]:
        if d["cases"]:
            yield from _dtype(d)
    yield "\n</details>"


def _dtype(d: DTypeReport) -> Iterator[str]:
    yield f"\n### {text.markdown(d['dtype'])}\n"
    tensors = tensors_in([d])
    rows = [
        [
            *map(text.markdown, (o["oracle"], o["group"])),
            text.tally(o),
            str(o["inapplicable"]),
            *_worst(o, tensors),
        ]
        for o in oracles_of(d)
    ]
    columns = ["oracle", "group", "cases", "not applicable", *_ratios(tensors)]
    yield from table(columns, rows, range(2, len(columns)))
    spreads: dict[str, Distribution | None] = {
        f"r_{name}": d["tensors"][name]["r"] for name in tensors
    }
    spreads |= {"lse_ulp": d["lse_ulp"], "bound_ratio": d["bound_ratio"]}
    cells = [
        _spread(text.MEASURES[key], found) for key, found in spreads.items() if found is not None
    ]
    if cells:
        yield ""
        yield from table(
            ["measure", "cases", "least", "median", "90 %", "99 %", "worst"], cells, range(1, 7)
        )
    for title, worst in worst_of(d):
        yield f"\n{title}, {text.markdown(worst['oracle'])}, config {text.code(worst['config'])}:\n"
        yield from _block(worst["replay"], "sh")
    empty = (
        f"; **empty: {text.markdown(', '.join(d['bins_missing']))}**" if d["bins_missing"] else ""
    )
    yield f"\nCoverage: {len(d['bins'])} bins filled{empty}."
    if d["seconds"]:
        steps = ", ".join(
            f"{text.markdown(s)} {text.seconds(t['median'])}" for s, t in d["seconds"].items()
        )
        yield f"\nMedian time per case: {steps}."


def _spread(name: str, found: Distribution) -> list[str]:
    levels = (found["minimum"], found["median"], found["p90"], found["p99"], found["maximum"])
    return [name, str(found["count"]), *map(text.number, levels)]


def _shortcomings(report: Report) -> Iterator[str]:
    if report["not_run"]:
        yield "\n## Not run\n"
        rows = [
            [_name(n["variant"]), text.markdown(n["dtype"]), text.markdown(n["reason"])]
            for n in report["not_run"]
        ]
        yield from table(["variant", "dtype", "reason"], rows[:_LISTED])
        yield from _rest(len(rows))
    if report["lost"] or report["torn"] or report["unstable"]:
        yield "\n## Incomplete evidence\n"
        items = [
            f"- **both passed and failed** {text.code(u['oracle'])}: {text.code(u['case'])}"
            for u in report["unstable"]
        ]
        items += [
            f"- launched and never judged ({text.markdown(b['phase'])}): {text.code(b['case'])}"
            for b in report["lost"]
        ]
        items += [f"- line cut short by a kill: {text.code(place)}" for place in report["torn"]]
        yield from items[:_LISTED]
        yield from _rest(len(items))


def _rest(total: int) -> Iterator[str]:
    if total > _LISTED:
        yield f"\n… and {total - _LISTED} more in report.json."


def _device(report: Report) -> Iterator[str]:
    yield "\n## Device and sources\n"
    yield from table(
        ["", ""], [[text.markdown(name), text.markdown(item)] for name, item in device_rows(report)]
    )
    yield ""
    rows = [
        [_name(v["ref"]), text.code(v["path"]), text.code(v["source_hash"])]
        for v in ordered(report)
    ]
    yield from table(["variant", "source", "source hash"], rows)
