"""The records: what became of every mutant, as JSON that tests replay, and why some survive."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.faults.search import Catch
from tests.mutants.mutant import Mutant

KILLED = "killed"
BROKEN = "broken"  # raises whatever it is asked, as one does that no compiler takes
SAME = "same"  # every build has the machine code of the right kernel: there is nothing to ask
SURVIVED = "survived"
SURVIVORS = (SAME, SURVIVED)
EQUIVALENT = "equivalent"
UNSEEN = "unseen"


@dataclass(frozen=True)
class Entry:
    """What became of a mutant.

    how: KILLED, BROKEN, SAME or SURVIVED.  by: the question that convicted it.  asked: cases.
    seconds: of wall time.
    """

    how: str
    by: str
    asked: int
    seconds: float

    @property
    def catch(self) -> Catch | None:
        """The verdict that convicted a Triton mutant."""
        return Catch.parse(self.by) if self.by else None


@dataclass(frozen=True)
class Reason:
    """Why a mutant survives.

    what: EQUIVALENT, the same results on every problem of the support; or UNSEEN, a fault that no
    question here shows.
    """

    what: str
    why: str


@dataclass(frozen=True)
class Ledger:
    """What became of the mutants of one language.

    path: the record; explained: why some survive, as TOML.
    """

    path: Path
    explained: Path

    def load(self) -> dict[str, Entry]:
        """What is on record, by the mutant's id."""
        if not self.path.exists():
            return {}
        data = json.loads(self.path.read_text("utf-8"))
        return {id_: Entry(**entry) for id_, entry in data.items()}

    def current(self, mutants: Iterable[Mutant]) -> dict[str, Entry]:
        """The entries of these mutants."""
        entries = self.load()
        return {mutant.id: entries[mutant.id] for mutant in mutants if mutant.id in entries}

    def save(self, entries: Mapping[str, Entry]) -> None:
        """Write the JSON, a line each, at once or not at all."""
        lines = [
            f"{json.dumps(id_)}: {json.dumps(vars(entry))}"
            for id_, entry in sorted(entries.items())
        ]
        beside = self.path.with_suffix(".new")
        beside.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        beside.replace(self.path)

    def reasons(self) -> dict[str, Reason]:
        """Why mutants survive, by their ids.  Raises ValueError for a reason that says too
        little."""
        found: dict[str, Reason] = {}
        if not self.explained.exists():
            return found
        for id_, given in tomllib.loads(self.explained.read_text(encoding="utf-8")).items():
            reason = Reason(given["what"], given["why"])
            if reason.what not in (EQUIVALENT, UNSEEN) or not reason.why:
                raise ValueError(f"{id_}: {given} is no reason")
            found[id_] = reason
        return found


_HERE = Path(__file__).parent


def _in(folder: str) -> Ledger:
    return Ledger(_HERE / folder / "record.json", _HERE / folder / "survivors.toml")


TRITON = _in("triton")
CUDA = _in("cuda")
CUTE = _in("cute")


@dataclass(frozen=True)
class Score:
    """Of the mutants of one file, or of one operator."""

    killed: int
    unseen: int
    equivalent: int
    broken: int

    @staticmethod
    def of(mutants: Iterable[Mutant], ledger: Ledger) -> Score:
        """Of those that are on record; a survivor without a reason is unseen."""
        known, entries = ledger.reasons(), ledger.load()
        hows = [(mutant.id, entries[mutant.id].how) for mutant in mutants if mutant.id in entries]
        counts = Counter(
            known[id_].what if how in SURVIVORS and id_ in known else how for id_, how in hows
        )
        return Score(
            counts[KILLED],
            counts[UNSEEN] + counts[SURVIVED] + counts[SAME],
            counts[EQUIVALENT],
            counts[BROKEN],
        )

    @property
    def counted(self) -> int:
        """Mutants that are neither equivalent nor broken."""
        return self.killed + self.unseen

    @property
    def judged(self) -> int:
        """Mutants that are on record."""
        return self.counted + self.equivalent + self.broken

    @property
    def shown(self) -> str:
        """The killed ones of those that count, in per cent."""
        return f"{100 * self.killed / self.counted:.1f} %" if self.counted else "–"
