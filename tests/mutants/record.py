"""The record: what became of every mutant, as JSON that a test replays, and docs/mutation.md."""

from __future__ import annotations

import json
import statistics
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.search import Catch
from tests.mutants.hunt import BROKEN, KILLED, SURVIVED
from tests.mutants.mutant import Mutant
from verify.cell.process import ROOT

PATH = Path(__file__).with_name("record.json")
EXPLAINED = Path(__file__).with_name("survivors.toml")
DOCUMENT = ROOT / "docs" / "mutation.md"
EQUIVALENT = "equivalent"
UNSEEN = "unseen"


@dataclass(frozen=True)
class Entry:
    """What became of a mutant."""

    how: str
    by: str
    asked: int
    seconds: float

    @property
    def catch(self) -> Catch | None:
        """The verdict that convicted it."""
        return Catch.parse(self.by) if self.by else None


@dataclass(frozen=True)
class Reason:
    """Why a mutant survives.

    what: EQUIVALENT, the same results on every problem of the support; or UNSEEN, a fault that no
    question here shows.
    """

    what: str
    why: str


def load() -> dict[str, Entry]:
    """What is on record, by the mutant's id."""
    if not PATH.exists():
        return {}
    return {id_: Entry(**entry) for id_, entry in json.loads(PATH.read_text("utf-8")).items()}


def current(mutants: Iterable[Mutant], entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The entries of these mutants."""
    return {mutant.id: entries[mutant.id] for mutant in mutants if mutant.id in entries}


def save(entries: Mapping[str, Entry]) -> None:
    """Write the JSON, a line each."""
    lines = [
        f"{json.dumps(id_)}: {json.dumps(vars(entry))}" for id_, entry in sorted(entries.items())
    ]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def reasons() -> dict[str, Reason]:
    """Why mutants survive, by their ids.  Raises ValueError for a reason that says too little."""
    found = {}
    for id_, given in tomllib.loads(EXPLAINED.read_text(encoding="utf-8")).items():
        reason = Reason(given["what"], given["why"])
        if reason.what not in (EQUIVALENT, UNSEEN) or not reason.why:
            raise ValueError(f"{id_}: {given} is no reason")
        found[id_] = reason
    return found


@dataclass(frozen=True)
class Score:
    """Of the mutants of one file, or of one operator."""

    killed: int
    unseen: int
    equivalent: int
    broken: int

    @staticmethod
    def of(mutants: Iterable[Mutant], entries: Mapping[str, Entry]) -> Score:
        known = reasons()
        counts = Counter(
            known[mutant.id].what
            if entries[mutant.id].how == SURVIVED and mutant.id in known
            else entries[mutant.id].how
            for mutant in mutants
        )
        unseen = counts[UNSEEN] + counts[SURVIVED]
        return Score(counts[KILLED], unseen, counts[EQUIVALENT], counts[BROKEN])

    @property
    def shown(self) -> str:
        """killed of those that are no equivalents, in per cent."""
        all_ = self.killed + self.unseen
        return f"{100 * self.killed / all_:.1f} %" if all_ else "–"


def document(mutants: Sequence[Mutant], entries: Mapping[str, Entry]) -> str:
    """docs/mutation.md."""
    judged = [mutant for mutant in mutants if mutant.id in entries]
    whole = Score.of(judged, entries)
    seconds = [entries[m.id].seconds for m in judged if entries[m.id].how == KILLED]
    asked = [entries[m.id].asked for m in judged if entries[m.id].how == KILLED]
    by = Counter(c.oracle for m in judged if (c := entries[m.id].catch) is not None)
    parts = [
        "# Mutation score",
        "",
        "How many small changes of the shipped kernels the suite convicts without a GPU. Written by"
        "\n`python -m tests.mutants`; `tests/meta/campaign/test_mutants.py` replays a part.",
        "",
        f"{len(judged)} of {len(mutants)} chosen mutants of Triton kernels, each with one change by"
        "\nan operator of `tests/mutants/operators.py`, ran in Triton's interpreter and were asked"
        "\npart of what a campaign asks, until a verdict failed."
        f" **{whole.killed} are convicted, {whole.unseen} are not seen:"
        f"\na score of {whole.shown}.** {whole.equivalent} more give the right result on every"
        f" problem of the support (equivalent),\nand {whole.broken} raise whatever they are asked,"
        " as a program does that does not compile: neither counts.",
        "",
        f"A conviction took {statistics.median(asked or [0]):.0f} case in the median and"
        f" {max(asked, default=0)} at most, {statistics.median(seconds or [0]):.1f} s in the median"
        " on one\ncore of several in use.",
        "",
        "## By file",
        "",
        "| File | Convicted | Not seen | Score | Equivalent | Broken |",
        "|---|---:|---:|---:|---:|---:|",
        *(
            _row(f"`{name}`", Score.of(group, entries))
            for name, group in _grouped(judged, lambda mutant: mutant.ground.edited)
        ),
        "",
        "## By operator",
        "",
        "| Operator | Convicted | Not seen | Score | Equivalent | Broken |",
        "|---|---:|---:|---:|---:|---:|",
        *(
            _row(name, Score.of(group, entries))
            for name, group in _grouped(judged, lambda mutant: mutant.mutation.operator)
        ),
        "",
        "## By whom",
        "",
        "The first oracle that convicts: "
        + ", ".join(f"{n} {c}" for n, c in by.most_common())
        + ".",
        "",
        "## Survivors",
        "",
        "| Mutant | Line | Text | Becomes | Why it survives |",
        "|---|---:|---|---|---|",
        *(_survivor(mutant) for mutant in judged if entries[mutant.id].how == SURVIVED),
    ]
    return "\n".join(parts) + "\n"


def _grouped(mutants: Sequence[Mutant], key) -> list[tuple[str, list[Mutant]]]:
    names = dict.fromkeys(key(mutant) for mutant in mutants)
    return [(name, [m for m in mutants if key(m) == name]) for name in sorted(names)]


def _row(name: str, score: Score) -> str:
    cells = (score.killed, score.unseen, score.shown, score.equivalent, score.broken)
    return f"| {name} | " + " | ".join(map(str, cells)) + " |"


def _survivor(mutant: Mutant) -> str:
    reason = reasons().get(mutant.id)
    why = "not explained" if reason is None else f"{reason.what}: {reason.why}"
    texts = (f"`{text}`".replace("|", "\\|") for text in (mutant.before, mutant.after))
    return f"| `{mutant.id}` | {mutant.mutation.line} | " + " | ".join(texts) + f" | {why} |"
