"""The record: what was found of every fault, as JSON that a test replays, and as the table of
docs/sensitivity.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.faults.catalogue import FAULTS
from tests.faults.classes import UNPLANTED
from tests.faults.fault import Fault
from tests.faults.rivals import RIVALS
from tests.faults.search import Catch, cheapest
from tests.harness.wrapped import item, wrapped
from verify.cell.process import ROOT
from verify.problem import Problem

PATH = Path(__file__).with_name("verdicts.json")
DOCUMENT = ROOT / "docs" / "sensitivity.md"
_SHORT = {"caught": "caught", "passed": "**passed**", "not asked": "–"}


@dataclass(frozen=True)
class Entry:
    """catches: the oracles that caught a fault, each with its first case; rivals: by name, what
    each said."""

    catches: tuple[Catch, ...]
    rivals: dict[str, str]

    @property
    def replay(self) -> Catch | None:
        """The cheapest of the catches."""
        return next(iter(cheapest(self.catches)), None)


def load() -> dict[str, Entry]:
    """What is on record, by the fault's name."""
    if not PATH.exists():
        return {}
    data = json.loads(PATH.read_text(encoding="utf-8"))
    return {
        name: Entry(tuple(map(Catch.parse, entry["caught"])), entry["rivals"])
        for name, entry in data.items()
    }


def save(entries: dict[str, Entry]) -> None:
    """Write both files; faults that are no longer in the catalogue are dropped."""
    known = {fault.name: entries[fault.name] for fault in FAULTS if fault.name in entries}
    data = {
        name: {"caught": [c.id for c in entry.catches], "rivals": entry.rivals}
        for name, entry in known.items()
    }
    PATH.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    DOCUMENT.write_text(document(known), encoding="utf-8")


def document(entries: dict[str, Entry]) -> str:
    """docs/sensitivity.md."""
    faults = [fault for fault in FAULTS if fault.name in entries]
    escaped = [fault for fault in faults if not entries[fault.name].catches]
    caught = len(faults) - len(escaped)
    named = sum(not fault.source.startswith("none known") for fault in faults)
    asked = sum(_only_asked(fault, entries[fault.name]) for fault in faults)
    parts = [
        "# Sensitivity",
        "",
        wrapped(
            "Which faults the oracles notice.  Written by `python -m tests.faults`; replayed by"
            " `tests/meta/campaign/test_faults.py`."
        ),
        "",
        wrapped(
            f"{len(faults)} faults are planted, one at a time, into the source of the kernels"
            f" (`tests/faults/`), {named} of them of a class that a public project really had. "
            " Each passes `allclose(atol=1e-2, rtol=0)` against fp64 on N(0, 1) inputs of a common"
            f" shape.  **{caught} are caught, {asked} of them only on a problem that a GPU is"
            f" asked; {len(escaped)} escape{'s' * (len(escaped) == 1)}.**"
        ),
        "",
        wrapped(
            "The kernels run on a CPU: Triton's in the interpreter, the others in torch. "
            " `tests/faults/kernels/split_kv.py` is there only to be broken: no kernel of the"
            " collection splits the keys or has a decode path."
        ),
        "",
        *_rivals_section(faults, entries),
        *_oracles_section(entries),
        "## Faults",
        "",
        wrapped(
            "An oracle is named where it convicted on one of the few cases that its group heard;"
            " that it is absent does not mean that it never would.  *source*: where a kernel had"
            " a bug of that class.  †: caught on a problem that campaigns on a GPU ask"
            " (`verify/oracles/long/problems.py`); an interpreter takes too long for it."
        ),
        "",
        *(_fault(fault, entries[fault.name]) for fault in faults),
        "",
        "What the rules of other suites say of each:",
        "",
        "| fault | " + " | ".join(rival.name for rival in RIVALS) + " |",
        "|" + " --- |" * (1 + len(RIVALS)),
        *(_row(fault, entries[fault.name]) for fault in faults),
        "",
        *_escapes_section(escaped),
        "## Classes that are not planted",
        "",
        *(item(f"{about}: {reason}") for about, reason in UNPLANTED),
    ]
    return "\n".join(parts) + "\n"


def _fault(fault: Fault, entry: Entry) -> str:
    oracles = ", ".join(dict.fromkeys(catch.oracle for catch in entry.catches)) or "**none**"
    oracles += " †" if _only_asked(fault, entry) else ""
    return item(
        f"**{fault.name}**: {fault.about}.  *source*: {fault.source}.  *caught by*: {oracles}"
    )


def _row(fault: Fault, entry: Entry) -> str:
    said = " | ".join(_SHORT[entry.rivals[rival.name]] for rival in RIVALS)
    return f"| {fault.name} | {said} |"


def _only_asked(fault: Fault, entry: Entry) -> bool:
    """Whether nothing caught it that a machine without a GPU is asked."""
    return bool(fault.asked) and any(
        catch.problem == Problem.parse(fault.asked).name for catch in entry.catches
    )


def _rivals_section(faults: list[Fault], entries: dict[str, Entry]) -> list[str]:
    rows = []
    for rival in RIVALS:
        said = Counter(entries[fault.name].rivals[rival.name] for fault in faults)
        rows.append(f"| {rival.name} | {said['caught']} | {said['passed']} | {said['not asked']} |")
    escaped = sum(not entries[fault.name].catches for fault in faults)
    return [
        "## Beside other suites' checks",
        "",
        wrapped(
            "Rules and inputs from public sources, named in `tests/faults/rivals.py`; lengths,"
            " batches and heads are scaled down to what the interpreter runs.  *passed*: a tensor"
            " that the rule compares differs from the right kernel's, and the rule accepts it. "
            " *not asked* (–): the inputs never reach the fault, or what it spoils is not compared."
            "  A rule that tests gradients hears a faulty Triton forward together with the shipped"
            " backward behind it.  A problem on which a rule fails a shipped kernel is left out for"
            " that kernel."
        ),
        "",
        "| rule | caught | passed | not asked |",
        "| --- | ---: | ---: | ---: |",
        *rows,
        f"| this suite | {len(faults) - escaped} | {escaped} | 0 |",
        "",
    ]


def _oracles_section(entries: dict[str, Entry]) -> list[str]:
    total = Counter(
        name for entry in entries.values() for name in {catch.oracle for catch in entry.catches}
    )
    alone = Counter(
        next(iter(names))
        for entry in entries.values()
        if len(names := {catch.oracle for catch in entry.catches}) == 1
    )
    rows = [
        f"| {name} | {count} | {alone[name] or ''} |"
        for name, count in sorted(total.items(), key=lambda item: (-item[1], item[0]))
    ]
    return [
        "## By oracle",
        "",
        "How many faults each caught, where it was asked; *alone*: no other oracle caught it.",
        "",
        "| oracle | faults | alone |",
        "| --- | ---: | ---: |",
        *rows,
        "",
    ]


def _escapes_section(escaped: Iterable[Fault]) -> list[str]:
    return [
        "## Escapes",
        "",
        *(item(f"**{fault.name}**: {fault.escapes}") for fault in escaped),
        "",
    ]
