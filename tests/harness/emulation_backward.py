"""Gradients as low-precision hardware computes them, on the CPU: FlashAttention-2's backward, with
the helpers of `tests.harness.emulation`.

A `BackwardKernel` is a declaration (`GradientNumerics`, arch, blocks), the forward that saves O and
LSE, and a style.  `emulate` computes a result that an honest backward of that declaration can
return.  It recomputes P from the saved LSE, or computes its own softmax; then the "saved" results
are exact.  A matrix unit's accumulator runs through all blocks ("chain"), or blocks are summed
separately and then added, the last one first ("partial").
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from references.score_mods import cap_of
from tests.harness.backward_inputs import Inputs, exact
from tests.harness.emulated_backward_steps import BackwardKernel, BackwardSteps
from tests.harness.emulated_steps import LN2, LOG2E, TINY, Luck, visible_pairs
from tests.harness.emulated_sums import (
    serial_sum,
)
from tests.harness.emulation import Result
from tests.harness.emulation import emulate as forward
from verify.arithmetic.instructions import ULP, tanh_error
from verify.problem import Problem

NAMES = ("dq", "dk", "dv")


def emulate(
    problem: Problem,
    kernel: BackwardKernel,
    luck: Luck = Luck.NEAREST,
    aim: str = "dq",
    inputs: Inputs | None = None,
) -> tuple[Result, dict[str, Tensor]]:
    """The forward's saved results, and dq, dk and dv from them in the problem's dtype.

    aim: the gradient whose first column the errors of transcendental functions move (Luck.AGAINST).
    """
    given = inputs or Inputs.of(problem)
    saved = (
        exact(problem, given)
        if kernel.numerics.softmax.source == "own"
        else forward(problem, kernel.forward, luck)
    )
    return saved, Backward(problem, kernel, luck, aim).run(given, saved)


class Backward(BackwardSteps):
    """The gradients, by the pairs of a query and a key and by the sums over them."""

    def run(self, given: Inputs, saved: Result) -> dict[str, Tensor]:
        p, fault = self.problem, self.kernel.fault
        q, dout, out = (x.flatten(0, 1).float() for x in (given.q, given.dout, saved.out))
        k, v = (self.per_query_head(x).float() for x in (given.k, given.v))
        visible = visible_pairs(p, q.device)
        if fault == "causal off by one":
            visible = visible | torch.nn.functional.pad(visible, (1, 0))[..., :-1]
        if fault == "mask in the forward alone":
            visible = torch.ones_like(visible)
        empty = ~visible.any(-1, keepdim=True)
        lse = saved.lse.flatten(0, 1)[..., None].masked_fill(empty, math.inf)
        own, of_weights = (
            self.numerics.softmax.source == "own",
            self.numerics.score_gradient.delta_of == "weights",
        )
        delta = self.delta(dout, out)
        first = -delta.expand(-1, -1, p.seqlen_kv) if self.kernel.initial else None
        dp = self.dot(dout, v.mT, self.numerics.products.operands, first, self.of_scores)
        factor = dp if self.kernel.initial or fault == "no delta" else dp - delta
        asking, used = self.scaled(q, k)
        raw = self.dot(asking, used.mT, self.numerics.products.operands, None, self.of_scores)
        sign = self.sign(factor, q, k, dout)
        if own:
            weights, slope = self.softmax(raw, visible, sign)
        else:
            weights, slope = self.weights(raw, lse, sign)
            weights = weights.masked_fill(~visible, 0.0)
        if own or of_weights:
            kept = self.round(weights, self.numerics.softmax.probability)
            whole_p = kept if self.numerics.score_gradient.of == "rounded" else weights
            delta = self.own_delta(whole_p, dp.masked_fill(~visible, 0.0))
            factor = dp - delta
        weights = weights.masked_fill(~visible, 0.0)
        if fault == "a lost pair of blocks":
            weights[..., -min(16, p.seqlen_q // 2) :, -min(16, p.seqlen_kv // 2) :] = 0.0
        rounded = self.cast(weights, self.numerics.softmax.probability, "P truncated")
        scored = rounded if self.numerics.score_gradient.of == "rounded" else weights
        ds = scored * dp - scored * delta if self.kernel.apart else scored * factor
        ds = ds if fault == "no slope" else ds * slope
        ds, scale = torch.where(visible, ds, 0.0), p.scale
        if self.numerics.score_gradient.scaled:
            ds, scale = ds * self.number(scale), 1.0
        ds = self.cast(ds, self.numerics.score_gradient.dtype, "dS truncated")
        weights = rounded
        rest, scale = self.behind_gradients(scale)
        if self.numerics.products.prescale == "alpha":
            ds, asking, used = self.inside(ds, q, k)
        kind = self.numerics.score_gradient.dtype
        whole = replace(self, aim="dq").over_blocks(
            ds, used, self.numerics.sums.block_n, kind, None, rest
        )
        dq = self.finish(whole, 1.0 if self.stored("dq") else rest)
        scale = 1.0 if fault == "no scale in dK" else scale
        dk = replace(self, aim="dk").over_heads(ds.mT, asking, kind, scale)
        dv = replace(self, aim="dv").over_heads(
            weights.mT, dout, self.numerics.softmax.probability, 1.0
        )
        shapes = (p.shape_q, p.shape_k, p.shape_v)
        return {
            name: x.view(shape) for name, x, shape in zip(NAMES, (dq, dk, dv), shapes, strict=True)
        }

    def scaled(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Q and K with the part of the scale that they are multiplied by."""
        by_q, by_k = 1.0, 1.0
        if self.numerics.products.prescale == "k":
            by_k = self.problem.scale * (LN2 if self.kernel.fault == "another base" else LOG2E)
        if self.numerics.products.prescale == "alpha":
            by_k = self.problem.scale
        if self.numerics.products.prescale == "sqrt":
            by_q, by_k = self.roots()
        return q if by_q == 1 else self.round(
            q * self.number(by_q), self.numerics.products.operands
        ), self.round(k * self.number(by_k), self.numerics.products.operands)

    def behind_gradients(self, scale: float) -> tuple[float, float]:
        """What multiplies the sums of dQ and of dK."""
        prescale = self.numerics.products.prescale
        if prescale == "sqrt":
            return self.roots()
        if prescale == "k" and self.problem.scale:
            return scale / self.problem.scale * LN2, scale
        return (1.0, 1.0) if prescale == "alpha" else (scale, scale)

    def inside(self, ds: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The operands of dQ and dK, of which the scale has multiplied some."""
        by = self.number(self.problem.scale)
        return (ds * by, q, k) if self.kernel.alpha == "ds" else (ds, q * by, k * by)

    @property
    def behind(self) -> float:
        """The part of the scale that multiplies products."""
        inside = self.numerics.products.prescale in ("sqrt", "alpha")
        return 1.0 if inside else self.problem.scale

    def roots(self) -> tuple[float, float]:
        """The fp32 numbers that Q and K are multiplied by."""
        root = float(torch.tensor(abs(self.problem.scale), device="cpu").sqrt())
        return math.copysign(root, self.problem.scale), root

    def per_query_head(self, x: Tensor) -> Tensor:
        """k or v of each query head, (batch * heads_q, seqlen_kv, dim)."""
        if self.kernel.fault == "heads taken in turn":
            return x.repeat(1, self.problem.group, 1, 1).flatten(0, 1)
        return x.repeat_interleave(self.problem.group, 1).flatten(0, 1)

    # Pairs

    def delta(self, dout: Tensor, out: Tensor) -> Tensor:
        """D, column by column."""
        if self.kernel.fault == "delta without O":
            out = torch.ones_like(out)
        if self.kernel.fault == "delta of the next row":
            out = out.roll(-1, 1)
        total = out.new_zeros(*out.shape[:2], 1)
        for d in range(out.shape[-1]):
            product = dout[..., d : d + 1] * out[..., d : d + 1]
            rounded = self.kernel.fault == "products of D in 16 bits"
            total += self.round(product, "input") if rounded else product
        kind = (
            "input"
            if self.kernel.fault == "delta in the input's dtype"
            else self.numerics.score_gradient.delta
        )
        return total if kind == "float32" else self.round(total, kind)

    def softmax(self, raw: Tensor, visible: Tensor, sign: Tensor) -> tuple[Tensor, Tensor]:
        """P of the backward's own row maximum and row sum, and the slope of the softcap at S."""
        x, slope = self.capped(raw * self.number(self.behind))
        x = x.masked_fill(~visible, -math.inf)
        largest = (
            x.amax(-1, keepdim=True).clamp(min=-3e38)
            if x.shape[-1]
            else x.new_zeros(*x.shape[:-1], 1)
        )
        if self.aim == "dv":  # what all keys of a row share, the row sum takes out again
            at = torch.arange(x.shape[-1], device=x.device)
            sign = sign * torch.where(at % 2 == 0, 1.0, -1.0)
        e = self.exp2((x - largest).double() * LOG2E, sign).masked_fill(~visible, 0.0)
        if self.kernel.fault == "a row sum without its last key":
            return e / serial_sum(e[..., :-1]).clamp(min=TINY), slope
        return e / serial_sum(e).clamp(min=TINY), slope

    def capped(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled scores after the softcap, and its slope."""
        if self.problem.score_mod is None:
            return x, self.number(1.0)
        cap, error = (
            self.number(cap_of(self.problem.score_mod)),
            tanh_error(self.numerics.softmax.softcap_tanh) - ULP,
        )
        tangent = (torch.tanh((x / cap).double()) * (1 + self.push * error)).float()
        return cap * tangent, 1 - tangent * tangent

    def own_delta(self, weights: Tensor, dp: Tensor) -> Tensor:
        """D as the sum of P dP."""
        delta = self.round(serial_sum(weights * dp), self.numerics.score_gradient.delta)
        if self.kernel.fault == "D without its last key":
            delta = serial_sum((weights * dp)[..., :-1])
        return delta.roll(-1, 1) if self.kernel.fault == "D of the next row" else delta

    def weights(self, raw: Tensor, lse: Tensor, sign: Tensor) -> tuple[Tensor, Tensor]:
        """P = exp(S - LSE), and the slope of the softcap at S."""
        p, slope = self.problem, self.number(1.0)
        scale = self.behind * (1.001 if self.kernel.fault == "scale off by 1e-3" else 1.0)
        if self.kernel.fault == "LSE of the other base":
            lse = lse * LOG2E
        if self.numerics.products.prescale == "k" and not p.score_mod:
            return self.exp2(
                (raw.double() - (lse * self.number(LOG2E)).double()).float(), sign
            ), slope
        if not (self.kernel.natural or p.score_mod):
            sigma = self.number(scale * LOG2E)
            if self.numerics.softmax.scale_roundings > 1:
                sigma = self.number(scale) * self.number(LOG2E)
            shift = lse * self.number(LOG2E)
            return self.exp2((raw.double() * sigma.double() - shift.double()).float(), sign), slope
        x, slope = self.capped(
            raw * self.number(LN2 if self.numerics.products.prescale == "k" else scale)
        )
        return self.exp2((x - lse).double() * LOG2E, sign), slope

    def sign(self, factor: Tensor, q: Tensor, k: Tensor, dout: Tensor) -> Tensor:
        """The sign of each exponential's error: it moves the first column of `aim` up."""
        return torch.sign(
            {
                "dq": factor * k[:, None, :, 0] * self.problem.scale,
                "dk": factor * q[:, :, None, 0] * self.problem.scale,
                "dv": dout[:, :, None, 0].expand_as(factor),
            }[self.aim]
        )
