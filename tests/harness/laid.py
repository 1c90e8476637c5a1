"""One run that lies in an arena, for tests of what is laid and of what a run changes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verify.cell.arena import Arena, Damage, Plan, pattern
from verify.cell.arena_runs import Runs


def laid(arena: Arena, where: Plan, inputs: Mapping[str, Tensor], poison: str = "nan") -> Runs:
    """Lay one run."""
    runs = Runs.alone(arena, where)
    runs.lay([inputs], [poison])
    return runs


def contents(runs: Runs, name: str) -> Tensor:
    """A contiguous copy of the buffer's present content."""
    view = runs.where[name].view(torch.from_numpy(runs.arena.bytes))
    return view.clone(memory_format=torch.contiguous_format)


def damage(runs: Runs) -> Damage | None:
    """The damage to one run, whose outputs it overwrites."""
    (found,) = runs.damages()
    return found


def fill(view: Tensor, poison: str) -> None:
    """Fill a buffer with a poison, as if it was never written."""
    view.copy_(pattern(view.dtype, poison).expand(view.shape))
