"""sanitizer.json as tables and pages, made from it alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from verify.document import (
    Block,
    Boxed,
    Code,
    Document,
    Inline,
    Line,
    Number,
    Paragraph,
    Row,
    Section,
    Span,
    Table,
    left_out,
    text,
)
from verify.document import markdown as page
from verify.sanitizers.account import Account, Planted, Tried

PLANTED = (
    "Tried in the same run, in the same way. A tool that misses what it must catch makes the whole"
    " run fail."
)


def document(account: Account) -> Document:
    """sanitizer.md."""
    device = account["device"]
    about = ", ".join(str(device[name]) for name in ("name", "driver") if device.get(name))
    lead = [Paragraph((f"compute-sanitizer {account['sanitizer']} on {about}; ", *run(account)))]
    return Document("Sanitizers", tuple(lead), tuple(_sections(account)))


def markdown(account: Account) -> str:
    """sanitizer.md."""
    return page.render(document(account), "sanitizer.json")


def run(account: Account) -> tuple[Inline, ...]:
    """When it ran, how long, and how much of the collection."""
    part = "" if account["whole"] else "; only a part of the collection"
    return "run ", Span(account["run"], "code"), f", {text.seconds(account['seconds'])}{part}."


def _sections(account: Account) -> Iterator[Section]:
    note = Paragraph(PLANTED, note=True)
    yield Section("Planted faults", "planted", (note, planted(account)))
    yield Section("Kernels", "kernels", (kernels(account["tried"]),))
    none = (Paragraph("None: every record counts."),)
    yield Section("Exceptions", "exceptions", exceptions(account) or none)
    yield Section("Findings", "findings", findings(account) or (Paragraph("None."),))
    if account["not_run"]:
        yield Section("Not run", "not-run", not_run(account))


def kernels(tried: Sequence[Tried], sources: Mapping[str, str] | None = None) -> Table:
    """One row per variant and tool.  sources: hashes of the sources that a report is of."""
    columns = ("variant", "tool", "processes", "cases", "records", "seconds", "verdict")
    rows: list[Row] = []
    for variant, tool in dict.fromkeys((t["variant"], t["tool"]) for t in tried):
        mine = [t for t in tried if (t["variant"], t["tool"]) == (variant, tool)]
        outcomes = [outcome for t in mine for outcome in t["cases"].values()]
        bad = [outcome for outcome in outcomes if outcome != "clean"]
        processes = [process for t in mine for process in t["processes"]]
        verdict = Span("clean", "good") if outcomes else Span("not tried", "bad")
        if bad:
            words = f"{len(bad)} of {len(outcomes)} {'/'.join(sorted(set(bad)))}"
            verdict = Span(words, "bad")
        if (sources or {}).get(variant) not in (None, mine[0]["source_hash"]):
            verdict = Span(f"{verdict.text}; of another source than this report's", "bad")
        numbers = (len(processes), len(outcomes), sum(one["total"] for one in processes))
        seconds = sum(one["seconds"] for one in processes)
        shown = Number(seconds, f"{seconds:.0f}")
        rows.append((Span(variant, "strong"), tool, *map(Number, numbers), shown, verdict))
    return Table(columns, tuple(rows))


def planted(account: Account) -> Table:
    """Per planted kernel: its name, what it does, and what each tool said."""
    found: dict[tuple[str, str], dict[str, Line]] = {}
    for one in account["planted"]:
        found.setdefault((one["variant"], one["about"]), {})[one["tool"]] = _word(one)
    rows = tuple(
        (Span(name, "strong"), about, *(cells.get(t, text.NONE) for t in account["tools"]))
        for (name, about), cells in found.items()
    )
    return Table(("planted", "what", *account["tools"]), rows)


def _word(planted: Planted) -> Line:
    twin, caught = planted["wanted"] == "clean", planted["wanted"] == "caught"
    if (caught and planted["holds"]) or (planted["record"] is not None and not twin):
        return Span("caught", "good")
    said = "not seen" if planted["outcome"] == "clean" and not twin else planted["outcome"]
    if not planted["holds"]:
        return Span(f"{said}, wanted {planted['wanted']}", "bad")
    return Span(said, "good" if said in ("caught", "clean") else "soft")


def exceptions(account: Account) -> tuple[Block, ...]:
    """The records that are known to be false, and whether one occurred."""
    names = ("tool", "kind", "kernel", "reason", "proof")
    rows = tuple(
        (
            *(w["tool"], w["kind"], w["kernel"], w["reason"], w["proof"]),
            Span("matched nothing", "bad") if w["dead"] else "used",
        )
        for w in account["waivers"]
    )
    return (Table((*names, ""), rows),) if rows else ()


def findings(account: Account) -> tuple[Block, ...]:
    """Every case that is not clean."""
    return tuple(
        Boxed("red", (Paragraph((Span(outcome, "bad"), f" under {t['tool']}")), Code(case)))
        for t in account["tried"]
        for case, outcome in t["cases"].items()
        if outcome != "clean"
    )


def not_run(account: Account) -> tuple[Block, ...]:
    """Variants that were not tried, by reason."""
    return left_out((left["variant"], left["reason"]) for left in account["not_run"])
