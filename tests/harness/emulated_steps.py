"""The steps of emulated attention: exponentials, sums, products and divisions as the hardware of a
`Kernel` computes them, for `tests.harness.emulation`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

from tests.harness.declared import with_fields
from tests.harness.emulated_sums import (
    fused_dot,
    least_exponent,
    serial_dot,
    truncate_tf32,
    truncated,
)
from verify.arithmetic.dot import fused_dot as exact_dot
from verify.arithmetic.dtypes import dtype_named
from verify.arithmetic.instructions import DIVISION, EXP, LOG_ERROR, ULP
from verify.arithmetic.mma import NearestChain, Promoted, unit_for
from verify.problem import Problem
from verify.variant import Numerics

U, TINY = 2.0**-24, 2.0**-126
LOG2E, LN2 = math.log2(math.e), math.log(2)


class Luck(Enum):
    """The errors of transcendental functions and divisions."""

    NEAREST = "nearest"
    AGAINST = "against"  # the largest allowed, in the directions that move the first column of O


@dataclass(frozen=True)
class Kernel:
    """An emulated kernel.

    style: "online" (FlashAttention's algorithm 1); "fused" (as in FlashAttention-2 and 3: raw
    maximum, one fma per exponent, which also holds the scale of an 8-bit P, one serial row sum over
    all blocks); "eager" (normalised P); "split" (two halves, merged by LSE).  fault: a planted
    fault, see `test_tolerance`, or "".  normalises: whether the unit normalises subnormal operands.
    eight: the instruction of 8-bit products, as the table of units names it.  errors: where
    `Luck.AGAINST` moves exponentials: "O", or "V" (each where its V is, in the first column), "up",
    "down", or "random".  tile: rows of a tile, where the order of keys depends on them.
    """

    name: str
    numerics: Numerics
    arch: str = "sm_90"
    style: str = "online"
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    fault: str = ""
    normalises: bool = False
    eight: str = ""
    errors: str = "O"
    tile: int = 16

    def but(self, **changes: object) -> Kernel:
        """Another kernel; names of `Numerics` fields change the numerics."""
        own = {key: value for key, value in changes.items() if key in Kernel.__dataclass_fields__}
        rest = {key: value for key, value in changes.items() if key not in own}
        return replace(self, **own, numerics=with_fields(self.numerics, **rest))


def visible_pairs(p: Problem, device: torch.device) -> Tensor:
    """The mask, (batch * heads_q, seqlen_q, seqlen_kv)."""
    return p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv, device).flatten(0, 1)


@dataclass(frozen=True)
class Steps:
    """The steps of one kernel with one problem.  factors: of q, k and v, (batch * heads_q, 1 or
    rows or keys, 1).  device: where they and the inputs are."""

    problem: Problem
    kernel: Kernel
    luck: Luck
    factors: dict[str, Tensor]
    device: str = field(default="cpu", kw_only=True)

    @property
    def numerics(self) -> Numerics:
        return self.kernel.numerics

    def number(self, value: float) -> Tensor:
        """A constant in fp32, where the inputs are."""
        return torch.tensor(value, device=self.device)

    @property
    def push(self) -> float:
        return 1.0 if self.luck is Luck.AGAINST else 0.0

    @property
    def probability(self) -> str:
        return (
            self.problem.dtype
            if self.numerics.output.probability == "input"
            else self.numerics.output.probability
        )

    @property
    def probability_scale(self) -> float:
        return (
            self.numerics.output.probability_scale if self.probability.startswith("float8") else 1.0
        )

    @property
    def promotions(self) -> tuple[int, int]:
        """Of Q K^T and of P V, 0 for never."""
        keys = self.numerics.softmax.block_n or max(self.problem.seqlen_kv, 1)
        return self.numerics.products.promotions(keys)

    def raised(self, top: Tensor, sigma: Tensor | float) -> Tensor:
        """The subtracted maximum: a tile's largest, rounded up.  sigma: factor to log2 units."""
        size, rows = self.numerics.softmax.maximum.rows, top.shape[1]
        if size != 1:
            size = size or max(rows, 1)
            pad = 0.0 if self.push else -math.inf  # rows of zeros past the end
            tiles = torch.nn.functional.pad(top, (0, 0, 0, -rows % size), value=pad)
            tops = tiles.unflatten(1, (-1, size)).amax(2, keepdim=True).expand(-1, -1, size, -1)
            top = tops.flatten(1, 2)[:, :rows]
        part = 1.0 if self.push else 0.6
        excess = part * self.numerics.softmax.maximum.excess
        step = part * self.numerics.softmax.maximum.step
        if not (excess or step):
            return top
        return torch.where(top == -math.inf, top, top + excess / sigma + step * top.abs())

    def sign(self, x: Tensor, v: Tensor) -> Tensor:
        """The sign of each exponential's error: positive if V of the key is above O, in the first
        column, or as the kernel's `errors` say."""
        if self.kernel.errors == "random":
            made = torch.Generator().manual_seed(self.problem.seed)
            return torch.randint(2, x.shape, generator=made).to(x.device).double() * 2 - 1
        if self.kernel.errors in ("up", "down"):
            return torch.full_like(x, 1.0 if self.kernel.errors == "up" else -1.0).double()
        if self.kernel.errors == "V":
            return torch.sign(v[:, None, :, 0].double()).expand(x.shape)
        exact = torch.softmax(
            x.double() * (LOG2E if self.kernel.style == "eager" else 1.0) * LN2, -1
        ).nan_to_num()
        return torch.sign(v[:, None, :, 0].double() - (exact @ v[..., :1].double()))

    def exp2(self, y: Tensor, sign: Tensor | float, rescale: bool = False) -> Tensor:
        """2^y with the declared error, flushed to zero below the normal range."""
        function = EXP[(rescale and self.numerics.softmax.rescale_exp) or self.numerics.softmax.exp]
        y = self.round(y.float(), function.argument) if function.argument != "float32" else y
        own = dtype_named(function.argument).unit_roundoff  # of the result
        size = y.double().abs().nan_to_num(posinf=0.0) * LN2
        error = self.push * (function.error + function.slope * size - 1.01 * own) * sign
        if function.one_at_zero:
            error = torch.where(y == 0, 0.0, error)
        value = (torch.exp2(y.double()) * (1 + error)).float()
        value = self.round(value, function.argument) if function.argument != "float32" else value
        return torch.where(value < TINY, 0.0, value)

    def count(self, p: Tensor, start: Tensor, running: bool) -> Tensor:
        """The sum of the row sum so far and a block's."""
        if self.numerics.softmax.row_sum.of == "mma":
            return self.weigh(p, p.new_ones(p.shape[0], p.shape[2], 1), start)
        if self.numerics.softmax.row_sum.of == "rounded":
            p = self.rounded(p)
        return self.add_up(p, start) if running else start + self.add_up(p, torch.zeros_like(start))

    def add_up(self, p: Tensor, start: Tensor) -> Tensor:
        """The row sum, key by key in each lane; the first lane starts from `start`."""
        lanes = 1 if self.kernel.fault == "one lane" else self.numerics.softmax.row_sum.lanes
        each = math.ceil(p.shape[-1] / lanes)
        total = start
        for lane in range(lanes):
            part = start if lane == 0 else torch.zeros_like(start)
            for j in range(lane * each, min((lane + 1) * each, p.shape[-1])):
                part = part + p[..., j : j + 1]
            total = total + part if lane else part
        return total

    def rounded(self, p: Tensor) -> Tensor:
        """P, rounded as for the product with V."""
        p = p if self.kernel.style == "fused" else p * self.probability_scale
        if self.kernel.fault == "P truncated":
            return truncated(p, dtype_named(self.probability))
        return self.round(p, self.probability)

    def weigh_parts(self, p: Tensor, v: Tensor, keys: slice, start: Tensor) -> Tensor:
        """start + round(P) V of these keys; in parts, each times its factor, if V has several."""
        size = self.problem.quantisation.keys
        if not size:
            return self.weigh(p, v[:, keys], start)
        at = keys.start
        while at < keys.stop:
            end = min((at // size + 1) * size, keys.stop)
            part, factor = p[..., at - keys.start : end - keys.start], self.factors["v"][:, at]
            own = self.weigh(part, v[:, at:end], torch.zeros_like(start))
            start, at = start + own * factor[:, None], end
        return start

    def weigh(self, p: Tensor, v: Tensor, start: Tensor) -> Tensor:
        """start + round(P) V."""
        kind, p = self.probability, self.rounded(p)
        narrow = "float32" if self.promotions[1] else self.numerics.products.accumulator
        start = start.to(getattr(torch, narrow)).float()
        if self.kernel.fault == "fp16 accumulation":
            for at in range(0, p.shape[-1], 16):
                start = (start + p[..., at : at + 16] @ v[:, at : at + 16]).half().float()
            return start
        if {kind, self.problem.dtype} == {"float16", "bfloat16"}:
            if self.numerics.output.values == "input" or self.kernel.fault == "V as it is":
                kind = "float32"
            else:
                v = self.round(v, kind)
        kind = "float16" if kind.startswith("float8") and self.problem.format.itemsize > 1 else kind
        return self.dot(p, v, kind, self.numerics.products.accumulator, start)

    def dot(
        self, a: Tensor, b: Tensor, kind: str, accumulator: str, start: Tensor | None = None
    ) -> Tensor:
        """a b of scores, or start + a b of P and V."""
        if kind == "float32" and self.numerics.products.float32_products == "tf32":
            a, b, kind = truncate_tf32(a), truncate_tf32(b), "tf32"
        eight = self.kernel.eight if kind.startswith("float8") else ""
        unit = unit_for(self.kernel.arch, kind, accumulator, eight)
        if isinstance(unit, Promoted):
            start = a.new_zeros(a.shape[0], a.shape[1], b.shape[2]) if start is None else start
            more = -a.shape[2] % len(unit.wiring.order)
            x, y = (functional.pad(z, (0, more)).to(getattr(torch, kind)) for z in (a, b.mT))
            return exact_dot(*torch.broadcast_tensors(x[:, :, None], y[:, None]), start, unit)
        if isinstance(unit, NearestChain):
            if accumulator == "bfloat16" and self.numerics.products.accumulator_rounded == "block":
                return self.round(serial_dot(a, b, start), "bfloat16")
            return serial_dot(a, b, start, getattr(torch, accumulator))
        least = -1100 if self.kernel.normalises else least_exponent(unit, kind)
        step = self.promotions[start is not None]
        if not step or (unit.fraction >= 23 and accumulator == "float32"):
            return fused_dot(a, b, unit, start, least)
        for at in range(0, a.shape[2], step):
            part = fused_dot(a[:, :, at : at + step], b[:, at : at + step], unit, None, least)
            start = part if start is None else start + part
        return a.new_zeros(a.shape[0], a.shape[1], b.shape[2]) if start is None else start

    def divide(self, x: Tensor, total: Tensor) -> Tensor:
        """x / total with the allowed error; 0 for an empty row."""
        quotient, name = x / torch.where(total == 0, 1.0, total), self.numerics.output.division
        error = 2 * ULP if name == "any" else DIVISION[name].error
        return (
            (quotient.double() * (1 + self.push * (error - U))).float() if self.push else quotient
        )

    def log_sum(self, top: Tensor, total: Tensor, natural: bool) -> Tensor:
        """LSE of a row maximum (natural or log2) and a row sum; -inf for an empty row."""
        if self.kernel.fault == "LSE without the max":
            top = torch.zeros_like(top)
        log = torch.log2(total.double())
        log = (log + self.push * (LOG_ERROR - U) * log.abs().clamp(min=1.0)).float()
        if self.kernel.style == "fused" and self.kernel.fault != "LSE keeps the scale of P":
            log = log - math.log2(self.probability_scale)
        lse = top + log * self.number(LN2) if natural else (top + log) * self.number(LN2)
        return torch.where(total == 0, -math.inf, lse)[..., 0]

    def round(self, x: Tensor, dtype: str) -> Tensor:
        if dtype.startswith("float8"):
            # saturates, as cvt.rn.satfinite does
            x = x.clamp(-dtype_named(dtype).max, dtype_named(dtype).max)
        return x if dtype == "float32" else x.to(getattr(torch, dtype)).float()
