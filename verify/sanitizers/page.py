"""sanitizer.json as tables and pages, made from it alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from verify import document as doc
from verify.document import markdown as page
from verify.document import text
from verify.sanitizers import exports
from verify.sanitizers.account import Account, Failed, Further, Planted, Tried
from verify.sanitizers.counts import tool_version
from verify.sanitizers.tool import INSTRUMENTING

PLANTED = (
    "Tried in the same run, in the same way. A tool that misses what it must catch makes the whole"
    " run fail."
)

COPIES = (
    "Every CUDA kernel of the collection with one slip of the hand. A copy that nothing catches"
    " makes the whole run fail."
)

REPEATED = "What is required of a tool: in how many of the tries it came."

_TOLD = ("tool", "kind", "text")  # parts of a record that its message tells


def document(account: Account) -> doc.Document:
    """sanitizer.md."""
    device = account["device"]
    about = ", ".join(str(device[name]) for name in ("name", "driver") if device.get(name))
    if set(account["tools"]) & set(INSTRUMENTING):
        about += f", Triton {device.get('triton')}"
    lead = [
        doc.Paragraph((f"compute-sanitizer {account['sanitizer']} on {about}; ", *run(account)))
    ]
    return doc.Document("Sanitizers", tuple(lead), tuple(_sections(account)))


def markdown(account: Account) -> str:
    """sanitizer.md."""
    return page.render(document(account), "sanitizer.json")


def run(account: Account) -> tuple[doc.Inline, ...]:
    """When it ran, how long, and how much of the collection."""
    part = "" if account["whole"] else "; only a part of the collection"
    part += f"; it ended early: {cut}" if (cut := account.get("cut")) else ""
    return "run ", doc.Span(account["run"], "code"), f", {text.seconds(account['seconds'])}{part}."


def _sections(account: Account) -> Iterator[doc.Section]:
    note = doc.Paragraph(PLANTED, note=True)
    blocks = (note, planted(account), *blind(account))
    yield doc.Section("Planted faults", "planted", blocks)
    if repeated := over_runs(account):
        lead = doc.Paragraph(REPEATED, note=True)
        yield doc.Section("Planted faults over several runs", "repeated", (lead, *repeated))
    if bad := copies(account):
        lead = doc.Paragraph(COPIES, note=True)
        yield doc.Section("Known-bad copies of shipped kernels", "copies", (lead, *bad))
    yield doc.Section("Kernels", "kernels", (kernels(account["tried"]),))
    if others := further(account):
        yield doc.Section("Other runs", "further", others)
    none = (doc.Paragraph("None: every record counts."),)
    yield doc.Section("Exceptions", "exceptions", exceptions(account) or none)
    yield doc.Section("Findings", "findings", findings(account) or (doc.Paragraph("None."),))
    if account["not_run"]:
        yield doc.Section("Not run", "not-run", not_run(account))
    if taken := stages(account):
        yield doc.Section("Time", "time", taken)


def kernels(tried: Sequence[Tried], sources: Mapping[str, str] | None = None) -> doc.Table:
    """One row per variant and tool.  sources: hashes of the sources that a report is of."""
    columns = ("variant", "tool", "processes", "cases", "records", "seconds", "verdict")
    rows: list[doc.Row] = []
    for variant, tool in dict.fromkeys((t["variant"], t["tool"]) for t in tried):
        mine = [t for t in tried if (t["variant"], t["tool"]) == (variant, tool)]
        outcomes = [outcome for t in mine for outcome in t["cases"].values()]
        bad = [outcome for outcome in outcomes if outcome != "clean"]
        processes = [process for t in mine for process in t["processes"]]
        notes = {note for process in processes for note in process["reasons"] if not bad}
        word = "; ".join(("clean", *sorted(notes)))
        verdict = doc.Span(word, "good") if outcomes else doc.Span("not tried", "bad")
        if bad:
            words = f"{len(bad)} of {len(outcomes)} {'/'.join(sorted(set(bad)))}"
            if set(bad) == {"not run"}:
                reasons = {reason for process in processes for reason in process["reasons"]}
                words = "; ".join([words, *sorted(r.removeprefix("not run: ") for r in reasons)])
            verdict = doc.Span(words, "bad")
        if (sources or {}).get(variant) not in (None, mine[0]["source_hash"]):
            verdict = doc.Span(f"{verdict.text}; of another source than this report's", "bad")
        numbers = (len(processes), len(outcomes), sum(one["total"] for one in processes))
        seconds = sum(one["seconds"] for one in processes)
        shown = doc.Number(seconds, f"{seconds:.0f}")
        rows.append((doc.Span(variant, "strong"), tool, *map(doc.Number, numbers), shown, verdict))
    return doc.Table(columns, tuple(rows))


def further(account: Account) -> tuple[doc.Block, ...]:
    """Runs that tried what this one has not: their planted faults and their kernels."""
    blocks: list[doc.Block] = []
    for one in account.get("further", []):
        versions = dict.fromkeys(tool_version(one, tool) for tool in one["tools"])
        tools = ", ".join(one["tools"])
        blocks += [
            doc.Heading(": ".join(filter(None, (" and ".join(filter(None, versions)), tools)))),
            doc.Paragraph(
                (
                    *("Run ", doc.Span(one["run"], "code")),
                    f", {text.seconds(one['seconds'])}",
                    f"; it ended early: {one['cut']}." if one["cut"] else ".",
                )
            ),
            planted(one),
            *([kernels(one["tried"])] if one["tried"] else []),
        ]
    return tuple(blocks)


def planted(account: Account | Further) -> doc.Table:
    """Per planted kernel: its name, what it does, and what each tool said."""
    found: dict[tuple[str, str], dict[str, list[Planted]]] = {}
    for one in account["planted"]:
        if not one.get("spare"):
            runs = found.setdefault((one["variant"], one["about"]), {})
            runs.setdefault(one["tool"], []).append(one)
    rows = tuple(
        (doc.Span(name, "strong"), about, *(_words(runs.get(t, [])) for t in account["tools"]))
        for (name, about), runs in found.items()
    )
    return doc.Table(("planted", "what", *account["tools"]), rows)


def copies(account: Account) -> tuple[doc.Block, ...]:
    """Per known-bad copy of a shipped kernel: what caught it, in this run and in those with other
    tools."""
    not_tried = exports.untried(account["planted"])
    found: dict[tuple[str, str], list[str]] = {}
    runs: tuple[Account | Further, ...] = (account, *account.get("further", []))
    due = {variant for run_ in runs for variant in exports.due(run_["planted"])}
    for run_ in runs:
        for one in run_["planted"]:
            if one.get("copy_of"):
                caught = found.setdefault((one["variant"], one["about"]), [])
                hangs = " (it hangs)" if one.get("hangs") else ""
                version = tool_version(run_, one["tool"])
                of = "" if version == tool_version(account, one["tool"]) else f" of {version}"
                caught += [one["tool"] + of + hangs] * (one["record"] is not None or bool(hangs))

    def missed(variant: str) -> doc.Span:
        if variant not in due:
            return doc.Span("no tool of this run sees it")
        return doc.Span("not run" if variant in not_tried else "nothing", "bad")

    rows = tuple(
        (
            doc.Span(variant, "strong"),
            about,
            doc.Span(", ".join(_counted(caught)), "good") if caught else missed(variant),
        )
        for (variant, about), caught in found.items()
    )
    return (doc.Table(("copy", "what", "caught by"), rows),) if rows else ()


def over_runs(account: Account) -> tuple[doc.Block, ...]:
    """Per planted kernel and tool: in how many tries the tool did what is wanted, if one was tried
    more than once."""
    counts = account.get("counts", [])
    if all(int(count["tried"]) < 2 for count in counts):
        return ()
    rows: list[doc.Row] = []
    for count in counts:
        word = "caught" if count["wanted"] == "caught" else "clean"
        look: doc.Look = "good" if count["held"] == count["tried"] else "bad"
        said = doc.Span(f"{word} {count['held']} of {count['tried']}", look)
        name = doc.Span(count["variant"], "strong")
        by = count.get("by", "")
        rows.append((name, count["tool"], by, said, doc.Number(len(count["runs"]))))
    return (doc.Table(("planted", "tool", "of", "", "runs"), tuple(rows)),)


def _counted(words: Sequence[str]) -> list[str]:
    """The words without repetition; one that is repeated says how often it was there."""
    numbers = {word: words.count(word) for word in words}
    return [word if number == 1 else f"{word}, {number} runs" for word, number in numbers.items()]


def _words(runs: Sequence[Planted]) -> doc.Line:
    """What a tool said of a planted kernel; in how many tries, if it was repeated."""
    tries = sum(int(one.get("tries", 1)) for one in runs)
    if tries < 2:
        return _word(runs[0]) if runs else text.NONE
    twin = runs[0]["wanted"] == "clean"
    if runs[0]["wanted"] == "any":
        shown = sum(one["record"] is not None for one in runs)
    else:
        shown = sum(int(one.get("held", one["holds"])) for one in runs)
    every = all(one["holds"] for one in runs)
    look: doc.Look = "bad" if not every else "good" if shown == tries else "soft"
    return doc.Span(f"{'clean' if twin else 'caught'} in {shown} of {tries}", look)


def _word(planted: Planted) -> doc.Line:
    twin, caught = planted["wanted"] == "clean", planted["wanted"] == "caught"
    if (caught and planted["holds"]) or (planted["record"] is not None and not twin):
        return doc.Span("caught", "good")
    unseen = "not seen, by design" if planted.get("blind") else "not seen"
    said = unseen if planted["outcome"] == "clean" and not twin else planted["outcome"]
    if not planted["holds"]:
        return doc.Span(f"{said}, wanted {planted['wanted']}", "bad")
    return doc.Span(said, "good" if said in ("caught", "clean") else "soft")


def blind(account: Account) -> tuple[doc.Block, ...]:
    """What the tools are not required to see, and why."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in account["planted"]:
        if why := one.get("blind"):
            reasons.setdefault((one["tool"], why), []).append(one["variant"])
    rows = tuple((tool, why, ", ".join(names)) for (tool, why), names in reasons.items())
    columns = ("tool", "does not look at", "so need not see")
    return (doc.Table(columns, rows),) if rows else ()


def exceptions(account: Account) -> tuple[doc.Block, ...]:
    """The records that are known to be false, and whether one occurred."""
    names = ("tool", "kind", "kernel", "source", "reason", "evidence", "version")
    rows = tuple(
        (
            *(w["tool"], w["kind"], w["kernel"], w["source"]),
            *(w["reason"], w["evidence"], w["version"]),
            doc.Span("matched nothing", "bad")
            if w["dead"]
            else ("used" if w.get("used", True) else "not met"),
        )
        for w in account["waivers"]
    )
    return (doc.Table((*names, ""), rows),) if rows else ()


def findings(account: Account) -> tuple[doc.Block, ...]:
    """Every failure: what, where, and the command that repeats it."""
    return tuple(
        doc.Boxed(
            "red",
            (
                doc.Paragraph((doc.Span(one["outcome"], "bad"), f" {one['tool']}: {_said(one)}")),
                doc.Code(one["replay"]),
            ),
        )
        for run_ in (account, *account.get("further", []))
        for one in run_.get("failures", [])
    )


def _said(failure: Failed) -> str:
    """The message, and the parts of the record."""
    parts = {**(failure["record"] or {}), "launched at": failure["frame"]}
    shown = {name: value for name, value in parts.items() if value and name not in _TOLD}
    return "; ".join([failure["message"], *(f"{name} {value}" for name, value in shown.items())])


def not_run(account: Account) -> tuple[doc.Block, ...]:
    """Variants that were not tried, by reason."""
    return doc.left_out((left["variant"], left["reason"]) for left in account["not_run"])


def stages(account: Account) -> tuple[doc.Block, ...]:
    """How long each stage took."""
    rows: list[doc.Row] = []
    for name, stage in account.get("stages", {}).items():
        numbers = (stage["begun"], stage["ended"], stage["processes"], stage["busy"])
        rows.append((name, *(doc.Number(number, f"{number:.0f}") for number in numbers)))
    columns = ("stage", "from (s)", "to (s)", "processes", "seconds of all")
    return (doc.Table(columns, tuple(rows)),) if rows else ()
