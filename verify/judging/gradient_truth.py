"""Gradients and bounds of one case, in fp64: what is asked, and the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verify.judging.truth import on_device
from verify.problem import Problem
from verify.tolerance import backward
from verify.tolerance.backward import GradientArithmetic, GradientTruth, OwnForward


@dataclass(frozen=True)
class GradientQuestion:
    """What `backward.gradient_truth` gets.

    inputs: q, k and v at their full logical shapes, descales applied.  start: O and natural LSE
    from which the gradients are computed.  unknown: of a backward without a declaration.
    """

    problem: Problem
    inputs: tuple[Tensor, Tensor, Tensor]
    dout: Tensor
    start: tuple[Tensor, Tensor]
    arithmetics: tuple[GradientArithmetic, ...]
    unknown: OwnForward | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """q, k, v, dO, O and LSE."""
        return (*self.inputs, self.dout, *self.start)

    @property
    def products(self) -> float:
        """Multiply-adds, roughly."""
        p = self.problem
        return 3.0 * p.pairs * (p.head_dim + p.head_dim_v)

    def computed(self) -> GradientTruth:
        """The answer, on the CPU."""
        return on_device(self.products, self.computed_on)

    def computed_on(self, device: torch.device) -> GradientTruth:
        """The answer, computed on that device."""
        q, k, v, dout, out, lse = (x.to(device) for x in self.tensors)
        made = self.unknown
        if made is not None:
            made = OwnForward(made.out.to(device), made.lse.to(device))
        return backward.gradient_truth(
            self.problem, q, k, v, dout, out, lse, *self.arithmetics, unknown=made
        ).to("cpu")


@dataclass(frozen=True)
class GradientAnswer:
    """The gradients under these arithmetics, computed together with those of other cases."""

    arithmetics: Sequence[GradientArithmetic]
    truth: GradientTruth
