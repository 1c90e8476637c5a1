"""One launch of a kernel: its reply, its raw outputs, and the damage that it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from verify.cell.arena import Damage
from verify.cell.arena_runs import Runs
from verify.cell.process import Reply


@dataclass(frozen=True)
class Launch:
    """One launch.  outputs: raw, as the kernel wrote them, contiguous on the CPU, by the name of
    their buffer; empty unless the kernel ran or refused.  written: it is known that every element
    of them was written."""

    reply: Reply
    poison: str
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    damage: Damage | None = None
    written: bool = False

    @property
    def out(self) -> Tensor | None:
        return self.outputs.get("out")

    @property
    def lse(self) -> Tensor | None:
        return self.outputs.get("lse")


def read(runs: Runs, replies: Sequence[Reply], poisons: Sequence[str]) -> list[Launch]:
    """The launches that the arena holds."""
    outputs, written = runs.read()
    parts = zip(replies, poisons, outputs, runs.damages(), written, strict=True)
    return [Launch(*each) for each in parts]
