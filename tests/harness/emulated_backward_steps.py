"""The steps of an emulated backward: exponentials and sums as the hardware of a `BackwardKernel`
computes them, for `tests.harness.emulation_backward`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tests.harness.declared import with_fields
from tests.harness.emulated_steps import LN2, TINY, Kernel, Luck
from tests.harness.emulated_sums import fused_dot, least_exponent, serial_dot, truncate_tf32
from verify.arithmetic.dtypes import dtype_named
from verify.arithmetic.instructions import EXP
from verify.arithmetic.mma import NearestChain, unit_for
from verify.problem import Problem
from verify.variant import GradientNumerics


@dataclass(frozen=True)
class BackwardKernel:
    """An emulated backward.

    style: "chain" or "partial", see above.  natural: exponents are S - LSE, not one fma in base 2.
    initial: the accumulator of dP begins with -D.  apart: dS is P dP - P D.  wide: results stay
    fp32, so that their rounding does not hide other errors.  alpha: what a scale inside the
    products of dQ and dK multiplies, "operand" (K, Q) or "ds".  whole: from which part of
    the blocks of 16 terms to which they are seen whole; these come first, then those before them,
    then those behind.  fault: a planted fault, see `test_tolerance_backward`, or "".
    """

    name: str
    numerics: GradientNumerics
    forward: Kernel
    style: str = "chain"
    natural: bool = False
    initial: bool = False
    apart: bool = False
    wide: bool = False
    alpha: str = "operand"
    whole: tuple[float, float] | None = None
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    fault: str = ""

    @property
    def arch(self) -> str:
        return self.forward.arch

    def but(self, **changes: object) -> BackwardKernel:
        """Another kernel; names of `GradientNumerics` fields change the numerics."""
        own = {
            key: value
            for key, value in changes.items()
            if key in BackwardKernel.__dataclass_fields__
        }
        rest = {key: value for key, value in changes.items() if key not in own}
        return replace(self, **own, numerics=with_fields(self.numerics, **rest))


@dataclass(frozen=True)
class BackwardSteps:
    """The steps of one kernel with one problem.  aim: as in `emulation_backward.emulate`.  device:
    where the inputs are."""

    problem: Problem
    kernel: BackwardKernel
    luck: Luck
    aim: str
    device: str = field(default="cpu", kw_only=True)

    @property
    def numerics(self) -> GradientNumerics:
        return self.kernel.numerics

    def number(self, value: float) -> Tensor:
        """A constant in fp32, where the inputs are."""
        return torch.tensor(value, device=self.device)

    @property
    def of_scores(self) -> str:
        """The accumulator of S and dP."""
        return self.numerics.products.score_accumulator or self.numerics.products.accumulator

    @property
    def push(self) -> float:
        return 1.0 if self.luck is Luck.AGAINST else 0.0

    def exp2(self, y: Tensor, sign: Tensor) -> Tensor:
        function = EXP[self.numerics.softmax.exp]
        y = self.round(y.float(), function.argument) if function.argument != "float32" else y
        size, own = (
            y.double().abs().nan_to_num(posinf=0.0) * LN2,
            dtype_named(function.argument).unit_roundoff,
        )
        error = self.push * (function.error + function.slope * size - 1.01 * own) * sign
        value = (torch.exp2(y.double()) * (1 + error)).float()
        value = self.round(value, function.argument) if function.argument != "float32" else value
        return torch.where(value < TINY, 0.0, value)

    def blocks(self, length: int, declared: int | None) -> Iterator[slice]:
        size = declared or (max(length, 1) if self.kernel.whole is None else 16)
        found = [slice(at, min(at + size, length)) for at in range(0, length, size)]
        if self.kernel.whole is not None:
            first, last = (round(part * len(found)) for part in self.kernel.whole)
            return iter(found[first:last] + found[:first] + found[last:])
        return iter(found if self.kernel.style == "chain" else found[::-1])

    def stored(self, name: str) -> bool:
        """Whether that gradient is added up in memory in 16 bits."""
        return name in self.numerics.sums.atomics and self.numerics.sums.atomics_dtype == "input"

    def over_blocks(
        self,
        weights: Tensor,
        operand: Tensor,
        block: int | None,
        kind: str,
        start: Tensor | None,
        scale: float = 1.0,
    ) -> Tensor:
        """start + weights @ operand, one block of terms after the other; scaled if it is summed in
        memory in 16 bits."""
        total = weights.new_zeros(*weights.shape[:2], operand.shape[-1]) if start is None else start
        parts = list(self.blocks(weights.shape[-1], block))
        if self.kernel.fault == "drops the last block":
            parts = parts[:-1] if self.kernel.style == "chain" else parts[1:]
        for part in parts:
            if self.kernel.fault == "fp16 accumulation":
                total = (total + weights[..., part] @ operand[:, part]).half().float()
            elif self.stored(self.aim):
                share = self.dot(weights[..., part], operand[:, part], kind) * self.number(scale)
                total = self.round(total + self.round(share, "input"), "input")
            elif self.kernel.style == "chain":
                total = self.dot(weights[..., part], operand[:, part], kind, total)
            else:
                total = total + self.dot(weights[..., part], operand[:, part], kind)
                total = self.round(total, self.numerics.products.accumulator)
        return total

    def over_heads(self, weights: Tensor, operand: Tensor, kind: str, scale: float) -> Tensor:
        """dK or dV: summed over the rows, and over the query heads of each group."""
        weights, operand = (x.unflatten(0, (-1, self.problem.group)) for x in (weights, operand))
        heads = range(self.problem.group)
        if self.kernel.fault == "first head of a group alone":
            heads = range(1)
        block, total = self.numerics.sums.block_m, None
        for head in heads:
            if self.numerics.sums.group == "cast" and self.problem.group > 1:
                one = self.finish(
                    self.over_blocks(weights[:, head], operand[:, head], block, kind, None), scale
                ).float()
                total = one if total is None else total + one
            else:
                total = self.over_blocks(
                    weights[:, head], operand[:, head], block, kind, total, scale
                )
        assert total is not None
        if self.numerics.sums.group == "cast" and self.problem.group > 1:
            return total if self.kernel.wide else total.to(self.problem.format.torch)
        return self.finish(total, 1.0 if self.stored(self.aim) else scale)

    def dot(
        self, a: Tensor, b: Tensor, kind: str, start: Tensor | None = None, sums: str = ""
    ) -> Tensor:
        """sums: the dtype of S and dP; by default that of the gradients."""
        kind = self.problem.dtype if kind == "input" else kind
        if kind == "float32" and self.numerics.products.float32_products == "tf32":
            a, b, kind = truncate_tf32(a), truncate_tf32(b), "tf32"
        sums = sums or self.numerics.products.accumulator
        unit = unit_for(self.kernel.arch, kind, sums)
        if isinstance(unit, NearestChain):
            return serial_dot(a, b, start, getattr(torch, sums))
        return fused_dot(a, b, unit, start, least_exponent(unit, kind))

    def finish(self, total: Tensor, scale: float) -> Tensor:
        total = total * self.number(scale)
        return total if self.kernel.wide else total.to(self.problem.format.torch)

    def round(self, x: Tensor, kind: str) -> Tensor:
        kind = self.problem.dtype if kind == "input" else kind
        return x if kind == "float32" else x.to(getattr(torch, kind)).float()

    def cast(self, x: Tensor, kind: str, truncated: str) -> Tensor:
        """As `round`; toward zero with that fault."""
        found = self.round(x, kind)
        if self.kernel.fault != truncated:
            return found
        kept = found.to(self.problem.format.torch)
        away = (found.abs() > x.abs()) & found.isfinite()
        bits = kept.view(torch.int16)
        return torch.where(away, bits - 1, bits).view(kept.dtype).float()
