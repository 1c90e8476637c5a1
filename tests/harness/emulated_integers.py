"""Kernels that round Q and K to 8-bit integers by factors of their own, emulated on the CPU: every
grouping of rows that a declaration allows, both quotients, ties both ways, with and without the
mean of K; and wrong ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.harness.emulation import Emulation, Kernel, Luck, Result
from verify.arithmetic.dtypes import dtype_named
from verify.problem import Problem
from verify.problem.inputs import tensors

PATTERNS = ("tile", "row", "pairs", "strided", "random", "reversed")
"""Which rows of a tile share a factor."""


@dataclass(frozen=True)
class Quantiser:
    """How an emulated kernel makes integers.

    pattern: of PATTERNS.  tile: rows of a tile of Q and K (0: all).  quotient: "x / factor", or "x
    * (127 / largest)".  ties: "even" or "away".  least: how `floor` enters, "added" or "at least".
    fault: "" or a planted one.
    """

    pattern: str = "tile"
    quotient: str = "x / factor"
    ties: str = "away"
    least: str = "added"
    fault: str = ""


def groups(rows: int, tile: int, pattern: str) -> Tensor:
    """The group of each row, (rows,) int64."""
    at = torch.arange(rows)
    size = tile or max(rows, 1)
    inside, start = at % size, at // size * size
    if pattern == "tile":
        return start
    if pattern == "row":
        return at
    if pattern == "pairs":
        return start + inside // 2
    if pattern == "strided":
        return start + inside % min(8, size)
    if pattern == "reversed":
        return start + (size - 1 - inside) // 3
    generator = torch.Generator().manual_seed(rows)
    return start + torch.randint(0, max(size // 3, 1), (rows,), generator=generator)


def integers(
    x: Tensor, tile: int, floor: float, how: Quantiser, which: str
) -> tuple[Tensor, Tensor]:
    """x (heads, rows, head_dim) fp32 as integers, in fp32, and the factor of each row, (heads,
    rows, 1)."""
    size = x.abs()
    largest = size.amax(-1)
    if how.fault == f"first row alone of {which}":
        largest = largest.where(torch.arange(x.shape[1]) == 0, torch.zeros(()))
    found = largest.clone()
    if x.shape[1]:
        index = groups(x.shape[1], tile, how.pattern).expand_as(largest)
        shared = torch.zeros(len(x), int(index.max()) + 1).scatter_reduce(1, index, largest, "amax")
        found = shared.gather(1, index)
    if how.least == "at least":
        found = found.clamp(min=floor)
    top = torch.tensor(128.0 if how.fault == "wraps at 128" else 127.0)
    factor = found / top + (floor if how.least == "added" else 0.0)
    nothing = factor == 0
    if how.quotient == "x / factor" or how.least == "added":
        quotient = x / factor.where(~nothing, torch.ones(()))[..., None]
    else:
        quotient = x * (top / found.where(~nothing, torch.ones(())))[..., None]
    if how.ties == "even":
        made = quotient.round()
    else:
        made = torch.trunc(quotient + 0.5 * torch.where(quotient >= 0, 1.0, -1.0))
    if how.fault == "cut":
        made = torch.trunc(quotient)
    made = torch.remainder(made + 128, 256) - 128  # int8 wraps
    if how.fault == f"factor of {which} of the next tile":
        factor = factor.roll(-(tile or 1), 1)
    if how.fault == f"factor of {which} forgotten":
        factor = factor.new_full(factor.shape, float(factor.flatten()[0]))
    if how.fault == f"factor of {which} off by 3 %":
        factor = factor * 1.03
    if how.fault == f"factors of {which} by column":
        columns = size.amax(1, keepdim=True) / 127
        made = (x / columns.clamp(min=1e-30)).round().clamp(-127, 127)
    return made, factor[..., None]


class IntegerEmulation(Emulation):
    """A walk over scores of integers."""

    how: Quantiser = Quantiser()

    def mean(self, k: Tensor) -> Tensor:
        """Of K (heads, keys, head_dim), rounded as declared."""
        centred = self.numerics.quantised.centred
        kept = self.problem.dtype if centred == "input" else centred
        return k.sum(1, keepdim=True).div(max(k.shape[1], 1)).to(dtype_named(kept).torch).float()

    @property
    def probability_scale(self) -> float:
        return self.numerics.quantised.probability_top or super().probability_scale

    def weigh(self, p: Tensor, v: Tensor, start: Tensor) -> Tensor:
        """start + round(P) V, both in 8 bits if V is quantised."""
        if not self.numerics.quantised.value_top:
            return super().weigh(p, v, start)
        p = self.rounded(p)
        return self.dot(p, v, self.probability, self.numerics.products.accumulator, start)

    def columns(self, v: Tensor) -> Tensor:
        """V rounded to 8 bits, as fp32; `factors` get what it is multiplied by."""
        top, of = self.numerics.quantised.value_top, dtype_named(self.probability)
        largest = v.float().abs().amax(2, keepdim=True) if v.shape[2] else v.float().sum(2, True)
        if self.how.fault == "largest of the first key":
            largest = v[:, :, :1].float().abs()
        nothing = largest == 0
        factor = (largest / top).where(~nothing, torch.ones(()))
        scaled = v.float() * (top / largest.where(~nothing, torch.ones(())))
        if self.how.quotient == "x / factor":
            scaled = v.float() / factor
        made = scaled.clamp(-of.max, of.max).to(of.torch).float()
        if self.how.fault == "factors of V of the next column":
            factor = factor.roll(1, -1)
        if self.how.fault == "factor of V forgotten":
            factor = torch.ones_like(factor)
        self.factors["v"] = factor.repeat_interleave(self.problem.group, 1).flatten(0, 1)
        return made

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Result:
        found = super().run(q, k, self.columns(v) if self.numerics.quantised.value_top else v)
        centred = self.numerics.quantised.centred
        if centred == "none" or self.how.fault == "mean not added back":
            return found
        kept = dtype_named(self.problem.dtype if centred == "input" else centred).torch
        keys = k.repeat_interleave(self.problem.group, 1).flatten(0, 1).float()
        back = (q.flatten(0, 1).float() @ self.mean(keys).mT).to(kept).float()[..., 0]
        return replace(found, lse=found.lse + (back * self.scale).view_as(found.lse))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        declared = self.numerics.quantised
        if declared.centred != "none":
            kept = self.problem.dtype if declared.centred == "input" else "float32"
            k = (k - self.mean(k)).to(dtype_named(kept).torch).float()
        unit = torch.ones(())
        if declared.query_scaled:
            unit = torch.tensor(self.scale * 1.4426950408889634)
        quantised_q, by_q = integers(
            q * unit, declared.query_tile or 0, declared.floor, self.how, "Q"
        )
        quantised_k, by_k = integers(k, declared.key_tile or 0, declared.floor, self.how, "K")
        sums = (quantised_q.double() @ quantised_k.double().mT).float()
        factor = by_q * by_k.mT
        made = sums * factor
        return made / unit if declared.query_scaled and self.scale else made


def emulate_integers(
    problem: Problem, kernel: Kernel, how: Quantiser, luck: Luck = Luck.NEAREST
) -> Result:
    """One forward pass with the problem's inputs."""
    inputs = tensors(problem)
    return emulate_given(problem, kernel, how, (inputs.q, inputs.k, inputs.v), luck)


def emulate_given(
    problem: Problem,
    kernel: Kernel,
    how: Quantiser,
    given: tuple[Tensor, Tensor, Tensor],
    luck: Luck = Luck.NEAREST,
) -> Result:
    """The same with other Q, K and V of the problem's shapes."""
    ones = torch.ones(problem.batch * problem.heads_q, 1, 1)
    emulation = IntegerEmulation(problem, kernel, luck, dict.fromkeys("qkv", ones))
    object.__setattr__(emulation, "how", how)
    shapes = (problem.shape_q, problem.shape_k, problem.shape_v)
    q, k, v = (x.expand(shape) for x, shape in zip(given, shapes, strict=True))
    return emulation.run(q, k, v)
