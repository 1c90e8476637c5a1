"""What every run must hold, in its order: who is asked, who is convicted, and what is no longer
asked then."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from verify.cell.arena import Damage
from verify.cell.process import Reply
from verify.judging.launch import Launch
from verify.judging.run_checks import held

GOOD = Launch(Reply("ok"), "nan", {"out": torch.zeros(1)})
RAISES = Launch(Reply("raised", "RuntimeError: no"), "nan")
WRITES = Launch(
    Reply("ok"), "nan", {"out": torch.zeros(1)}, Damage("redzone", 1, "1 byte past out")
)
SAVING = "the forward that saves O and LSE "


@dataclass
class Trial:
    """Stands in for a trial: two runs, and which of them were launched."""

    entry: str
    runs: dict[str, Launch]
    launched: set[str] = field(default_factory=set)

    def __getattr__(self, name: str) -> Launch:
        self.launched.add(name)
        return self.runs[name]


@pytest.mark.parametrize(
    ("saved", "first", "names", "launched"),
    [
        (None, GOOD, ["execution", "memory"], {"first"}),
        (None, RAISES, ["execution!"], {"first"}),
        (None, WRITES, ["execution", "memory!"], {"first"}),
        (GOOD, GOOD, ["execution", "memory"], {"saved", "first"}),
        (GOOD, WRITES, ["execution", "memory!"], {"saved", "first"}),
        (RAISES, GOOD, ["execution!"], {"saved"}),
        (WRITES, GOOD, ["memory!"], {"saved"}),
    ],
    ids=[
        "good",
        "raises",
        "writes",
        "both-good",
        "backward-writes",
        "saving-raises",
        "saving-writes",
    ],
)
def test_what_is_held_and_where_it_ends(
    saved: Launch | None, first: Launch, names: list[str], launched: set[str]
) -> None:
    trial = Trial(
        "forward" if saved is None else "backward", {"saved": saved or GOOD, "first": first}
    )
    found = list(held(trial))
    assert [name + "!" * (ruling.finding is not None) for name, _, ruling in found] == names
    assert trial.launched == launched
    for _, run, ruling in found:
        assert run is (first if "first" in launched else saved)
        assert ruling.finding is None or ruling.finding.message.startswith(SAVING) == (
            "first" not in launched
        )
