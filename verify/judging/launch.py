"""One launch of a kernel: its reply and its raw outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from verify.cell.arena import Damage
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
