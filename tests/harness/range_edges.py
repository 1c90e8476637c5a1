"""Emulated kernels that flush, and inputs at the edges of fp32's range, for tests that such kernels
are not convicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.harness.backward_inputs import Inputs
from tests.harness.emulated_steps import TINY, Kernel, Luck
from tests.harness.emulation import Emulation, Result
from tests.harness.emulation_backward import Backward, BackwardKernel
from tests.meta.tolerance.test_tolerance import Ratios, ratios
from verify.judging.comparison import compare
from verify.judging.truth import Truth, compute_truth
from verify.problem import Problem
from verify.tolerance.backward import GradientTruth, gradient_truth
from verify.tolerance.forward import resolve
from verify.tolerance.gradients_arithmetic import resolve as resolve_gradients
from verify.variant import Config

NAMES = ("dq", "dk", "dv")


def flushing_dot(a: Tensor, b: Tensor, least: float) -> Tensor:
    """fp32 products and sums, one after the other; each result below `least` becomes 0."""
    total = torch.zeros(a.shape[0], a.shape[1], b.shape[2])
    for j in range(a.shape[2]):
        total = _flushed(total + _flushed(a[:, :, j, None] * b[:, j, None], least), least)
    return total


def _flushed(x: Tensor, least: float) -> Tensor:
    return torch.where(x.abs() < least, 0.0, x)


@dataclass(frozen=True)
class Flushing(Emulation):
    """Scores of multiplications and additions that flush below `least`."""

    least: float = TINY

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return flushing_dot(q, k.mT, self.least)


@dataclass(frozen=True)
class FlushingBackward(Backward):
    """The same in every product of a backward."""

    least: float = TINY

    def dot(
        self, a: Tensor, b: Tensor, kind: str, start: Tensor | None = None, sums: str = ""
    ) -> Tensor:
        product = flushing_dot(a, b, self.least)
        return product if start is None else start + product


def filled(problem: Problem, **sizes: Any) -> Inputs:
    """Inputs with the given constants or tensors.  V and dO are random by default, with one zero
    column in V."""
    generator = torch.Generator().manual_seed(problem.seed)
    shapes = {
        "q": problem.shape_q,
        "k": problem.shape_k,
        "v": problem.shape_v,
        "dout": problem.shape_out,
    }
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["v"][..., 0] = 0.0
    tensors |= {
        name: torch.full(shapes[name], x) if isinstance(x, float) else x
        for name, x in sizes.items()
    }
    return Inputs(
        **{name: x.expand(shapes[name]).to(problem.format.torch) for name, x in tensors.items()}
    )


def truth(problem: Problem, kernel: Kernel, given: Inputs) -> Truth:
    """Reference and bounds of these inputs for the kernel's declaration."""
    arithmetic = resolve(kernel.numerics, Config(), problem, kernel.arch)
    return compute_truth(problem, (given.q, given.k, given.v), [arithmetic])


def run(problem: Problem, kernel: Kernel, given: Inputs, least: float = 0.0) -> Result:
    """The kernel's results; least: the kernel flushes smaller results, if it is not 0."""
    factors = dict.fromkeys("qkv", torch.ones(problem.batch * problem.heads_q, 1, 1))
    emulation = Flushing(problem, kernel, Luck.NEAREST, factors, least) if least else None
    emulation = emulation or Emulation(problem, kernel, Luck.NEAREST, factors)
    return emulation.run(given.q, given.k.float(), given.v.float())


def errors(problem: Problem, kernel: Kernel, given: Inputs, result: Result) -> Ratios:
    """Error over bound."""
    return ratios(problem, result, truth(problem, kernel, given))


def gradient_bounds(
    problem: Problem, kernel: BackwardKernel, given: Inputs, saved: Result
) -> GradientTruth:
    arithmetic = resolve_gradients(kernel.numerics, Config(), problem, kernel.arch)
    q, k, v, dout = given.q, given.k, given.v, given.dout
    return gradient_truth(
        problem, q, k, v, dout, saved.out.double(), saved.lse.double(), arithmetic
    )


def gradient_errors(
    problem: Problem, kernel: BackwardKernel, given: Inputs, saved: Result, least: float = 0.0
) -> dict[str, float]:
    """The largest error / bound of each gradient of a backward; least: as in `run`."""
    backward = (
        FlushingBackward(problem, kernel, Luck.NEAREST, "dq", least)
        if least
        else Backward(problem, kernel, Luck.NEAREST, "dq")
    )
    results = backward.run(given, saved)
    want = gradient_bounds(problem, kernel, given, saved)
    return {
        name: float(
            compare(
                results[name], getattr(want, name), getattr(want, f"{name}_bound"), problem.format
            ).ratio.max()
        )
        for name in NAMES
    }
