"""The facts of a case before its first launch: its kernel, its problem, its inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from verify.cell.arena import Arena
from verify.cell.process import Cell
from verify.judging.history import Hearing
from verify.judging.truth import Clock
from verify.problem import Problem
from verify.problem.inputs import Inputs, dequantised, dout, tensors
from verify.tolerance import forward as tolerance
from verify.tolerance.forward import ForwardArithmetic
from verify.variant import Config, Declaration


@dataclass
class Facts:
    """A case and its place: the kernel, its config and problem, and the cell that launches it.

    refuses: the problem is outside the support, so no forward can save O and LSE for a backward.
    hearing: the case in the history of its cell, shared with the trials beside it.  notes: results
    that an oracle will need again, by name.  number: of the case among those that are judged
    together; 0 for one alone.
    """

    declaration: Declaration
    config: Config
    problem: Problem
    cell: Cell
    arena: Arena
    arch: str
    entry: str = "forward"
    refuses: bool = False
    with_best: bool = False
    clock: Clock = field(default_factory=Clock)
    hearing: Hearing = field(default_factory=Hearing)
    notes: dict[str, Any] = field(default_factory=dict)
    number: int = 0

    @cached_property
    def inputs(self) -> Inputs:
        """The problem's values."""
        with self.clock.timed("generate"):
            return tensors(self.problem)

    @cached_property
    def dout(self) -> Tensor:
        """The upstream gradient."""
        return dout(self.problem)

    @cached_property
    def expanded(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v at their full logical shapes, descales applied."""
        return dequantised(self.problem, self.inputs)

    @property
    def own_softmax(self) -> bool:
        """Whether the backward on trial declares that it reads nothing that a forward saved."""
        declared = self.declaration.gradients
        return (
            self.entry == "backward" and declared is not None and declared.softmax.source == "own"
        )

    @property
    def reads_out(self) -> bool:
        """Whether the backward on trial declares that it reads the saved O."""
        declared = self.declaration.gradients
        return self.entry != "backward" or declared is None or declared.reads_out

    @property
    def arithmetic(self) -> ForwardArithmetic:
        """The declared arithmetic of the forward, resolved for this problem."""
        return tolerance.resolve(self.declaration.numerics, self.config, self.problem, self.arch)

    def natural_lse(self, lse: Tensor) -> Tensor:
        """A raw LSE as an fp64 natural logarithm."""
        factor = math.log(2) if self.declaration.contract.lse == "base2" else 1.0
        return lse.double() * factor
