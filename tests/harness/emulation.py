"""Attention as low-precision hardware computes it, on the CPU: fp32 steps and explicit roundings,
for the tests of the bounds.

A `Kernel` is a declaration (`Numerics`, arch, keys per rescale) and a style of iterating over the
keys.  `emulate` computes a result that an honest kernel of that declaration can return.  The
declaration leaves the errors of transcendental functions and divisions open; `Luck` selects them:
nearest, or the largest allowed errors in directions that add up.

Scores and P V of 8-bit, 16-bit and tf32 operands use the truncated fused dot-add of
`verify.arithmetic.mma.Unit`, computed exactly in fp64, with promotion if it is declared.  fp32
products are serial chains of rounded products and additions, the longest that the bound allows.
Row sums are such chains too, in the declared number of lanes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from references.score_mods import cap_of
from tests.harness.drawn_inputs import drawn
from tests.harness.emulated_steps import LOG2E, Kernel, Luck, Steps, visible_pairs
from tests.harness.emulated_sums import truncated
from verify.arithmetic.instructions import ULP, tanh_error
from verify.problem import Problem


@dataclass(frozen=True)
class Result:
    """out (batch, heads_q, seqlen_q, head_dim_v) in the problem's dtype_out; lse (batch, heads_q,
    seqlen_q) fp32, natural."""

    out: Tensor
    lse: Tensor


def emulate(problem: Problem, kernel: Kernel, luck: Luck = Luck.NEAREST) -> Result:
    """One forward pass with the problem's inputs."""
    inputs, factors = drawn(problem), {}
    for name in ("q", "k", "v"):
        shape = problem.quantisation.factors(name, problem.shapes)
        stored = inputs.others.get(f"descale_{name}", torch.ones(1, 1)).expand(shape)
        factor = problem.quantisation.spread(stored, name, problem.shapes)
        group = 1 if name == "q" else problem.group
        factors[name] = factor.repeat_interleave(group, 1).flatten(0, 1)
        if kernel.fault == f"descale of {name.upper()} of the next block":
            size = problem.quantisation.queries if name == "q" else problem.quantisation.keys
            factors[name] = factors[name].roll(-size, 1)
    shapes = (problem.shape_q, problem.shape_k, problem.shape_v)
    q, k, v = (
        x.expand(shape) for x, shape in zip((inputs.q, inputs.k, inputs.v), shapes, strict=True)
    )
    return Emulation(problem, kernel, luck, factors).run(q, k, v)


def store(out: Tensor, p: Problem, fault: str) -> Tensor:
    """O in fp32, rounded to the problem's dtype_out; an 8-bit one is scaled and saturates."""
    if p.scaled_output is None:
        cut = fault == "O truncated"
        return (truncated(out, p.format_out) if cut else out).to(p.format_out.torch)
    for _ in range({"scale of O forgotten": 0, "scale of O twice": 2}.get(fault, 1)):
        out = out * torch.tensor(p.output_scale, device=out.device)
    largest = p.format_out.max
    if fault == "maximum of another format":
        largest = 240.0 if p.dtype_out == "float8_e4m3fn" else 448.0
    inside = out.clamp(-largest, largest)
    if fault == "O truncated":
        inside = truncated(inside, p.format_out)
    stored = inside.to(p.format_out.torch)
    if fault != "O does not saturate":
        return stored
    spoiled = torch.tensor(math.nan if p.dtype_out == "float8_e4m3fn" else math.inf)
    beyond = out.abs() >= p.format_out.overflow
    return torch.where(beyond, spoiled.copysign(out), stored.float()).to(p.format_out.torch)


class Emulation(Steps):
    """The walks over the keys."""

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Result:
        p, fault = self.problem, self.kernel.fault
        k, v = (x.repeat_interleave(p.group, 1).flatten(0, 1).float() for x in (k, v))
        if fault == "V off by one row":
            v = v.roll(1, 1)
        visible = visible_pairs(p, q.device)
        if fault == "drops the last key":
            visible = visible & (torch.arange(p.seqlen_kv, device=q.device) != p.seqlen_kv - 1)
        if fault == "causal off by one":
            visible = visible | torch.nn.functional.pad(visible, (1, 0))[..., :-1]
        raw = self.scores(q.flatten(0, 1).float(), k)
        if fault == "drops the lightest key":
            visible = visible & (raw != raw.amin(-1, keepdim=True))
        if self.kernel.style == "fused":
            raw = raw.masked_fill(~visible, -math.inf)
            out, lse = self.walk(raw, v, raw=True)
        else:
            x = self.logits(raw).masked_fill(~visible, -math.inf)
            walk = {"online": self.walk, "eager": self.eager, "split": self.split}[
                self.kernel.style
            ]
            out, lse = walk(x, v)
        # The scale of P is taken back with V's factor, unless the row sum holds it too.
        factor = self.factors["v"].roll(int(fault == "descale of V of another head"), 0)
        factor = 1.0 if self.problem.quantisation.keys else factor
        out = out * (factor / (1.0 if self.kernel.style == "fused" else self.probability_scale))
        out = store(out, p, fault)
        return Result(out.view(p.shape_out), lse.view(p.shape_out[:3]))

    # Scores

    @property
    def scale(self) -> float:
        return self.problem.scale * (1.001 if self.kernel.fault == "scale off by 1e-3" else 1.0)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Q K^T as the unit computes it, from prescaled operands if that is declared."""
        operands = (
            self.problem.dtype
            if self.numerics.products.operands == "input"
            else self.numerics.products.operands
        )
        if self.numerics.products.prescale == "q":
            q = self.round(q * self.number(self.scale), operands)
        elif self.numerics.products.prescale == "sqrt":
            root = self.number(abs(self.scale)).sqrt()
            q, k = (
                self.round(q * root * math.copysign(1.0, self.scale), operands),
                self.round(k * root, operands),
            )
        raw = self.dot(
            q,
            k.mT,
            operands,
            self.numerics.products.score_accumulator or self.numerics.products.accumulator,
        )
        return (
            self.round(raw, self.problem.dtype) if self.numerics.softmax.scores == "input" else raw
        )

    def logits(self, raw: Tensor) -> Tensor:
        """Scaled scores in log2 units (natural for the eager style), softcap included, fp32."""
        natural = (
            self.kernel.style == "eager"
            or self.problem.score_mod is not None
            or self.numerics.softmax.scores == "input"
        )
        scale = 1.0 if self.numerics.products.prescale != "none" else self.scale
        if not natural:
            return raw * self.sigma(scale)
        x = raw * self.descaled(self.number(scale))
        if self.numerics.softmax.scores == "input":
            x = self.round(x, self.problem.dtype)
        cap = cap_of(self.problem.score_mod)
        if cap:
            cap, error = (
                self.number(cap),
                tanh_error(self.numerics.softmax.softcap_tanh) - ULP,
            )
            x = (
                cap
                * (torch.tanh((x / cap).double()) * (1 + self.push * error * torch.sign(x))).float()
            )
        return x if self.kernel.style == "eager" else x * self.number(LOG2E)

    def sigma(self, scale: float) -> Tensor:
        """scale log2 e, rounded once, or formed of two rounded factors."""
        if self.numerics.softmax.scale_roundings == 1 or self.problem.descaling != "none":
            return self.descaled(self.number(scale * LOG2E))
        return self.number(scale) * self.number(LOG2E)

    def descaled(self, scale: Tensor) -> Tensor:
        """scale times the factors of q and k."""
        if self.problem.descaling == "none":
            return scale
        scale = scale * self.factors["q"]
        if self.kernel.fault == "descale of Q squared":
            scale = scale * self.factors["q"]
        return (
            scale if self.kernel.fault == "descale of K forgotten" else scale * self.factors["k"].mT
        )

    # Walks over the keys

    def blocks(self, x: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """The blocks of keys in the declared order, with their scores, and the rows that take the
        block now, (heads, rows, 1); scores of others are -inf."""
        keys = x.shape[-1]
        size = self.numerics.softmax.block_n or max(keys, 1)
        parts = [slice(at, min(at + size, keys)) for at in range(0, keys, size)]
        order = self.numerics.softmax.maximum.key_order
        if order == "descending":
            parts.reverse()
        if order != "whole_first":
            every = x.new_ones(*x.shape[:2], 1, dtype=torch.bool)
            yield from ((part, x[..., part], every) for part in parts)
            return
        rows = torch.arange(-(-x.shape[1] // self.kernel.tile) * self.kernel.tile, device=x.device)
        seen = (x > -math.inf)[:, rows.clamp(max=x.shape[1] - 1)].unflatten(
            1, (-1, self.kernel.tile)
        )
        for first in (True, False):
            for part in parts:
                whole = seen[..., part].all(-1).all(-1) & (part.stop - part.start == size)
                whole = whole.repeat_interleave(self.kernel.tile, 1)[:, : x.shape[1], None]
                now = whole == first
                yield part, x[..., part].masked_fill(~now, -math.inf), now

    def walk(self, x: Tensor, v: Tensor, raw: bool = False) -> tuple[Tensor, Tensor]:
        """The online softmax; x in log2 units, or raw scores whose scaling is fused into the
        exponent."""
        top, more = x.new_full((*x.shape[:2], 1), -math.inf), math.log2(self.probability_scale)
        total, out = torch.zeros_like(top), x.new_zeros(*x.shape[:2], v.shape[-1])
        sigma, sign = self.sigma(self.scale), self.sign(x, v)
        before = top
        for part, scores, now in self.blocks(x):
            own = self.raised(scores.amax(-1, keepdim=True), sigma if raw else 1.0)
            new = torch.maximum(top, own)
            if self.kernel.fault == "stale maximum":
                new = torch.where(before == -math.inf, own, before)
                before = torch.maximum(before, own)
            if self.numerics.softmax.maximum.lag:
                ahead = (new - top) * (sigma if raw else 1.0)
                new = torch.where(ahead > self.numerics.softmax.maximum.lag, new, top)
            base = torch.where(new == -math.inf, 0.0, new)
            if raw:
                shift = base * sigma - more
                y = (scores.double() * sigma.double() - shift.double()).float()
                shrink = self.exp2((top - base) * sigma, 1.0, rescale=True)
            else:
                y, shrink = scores - base, self.exp2(top - base, 1.0, rescale=True)
            shrink = torch.where(now, shrink, 1.0)
            p = self.exp2(y, sign[..., part])
            shrink = torch.ones_like(shrink) if self.kernel.fault == "no rescale" else shrink
            total = self.count(p, total * shrink, raw)
            out = self.weigh_parts(p, v, part, out * shrink)
            top = new
        top = torch.where(top == -math.inf, 0.0, top) * (
            self.descaled(self.number(self.scale)) if raw else 1.0
        )
        return self.divide(out, total), self.log_sum(top, total, natural=raw)

    def parts(self, x: Tensor) -> list[slice]:
        """The keys of each part, some of them none."""
        count, keys = self.numerics.softmax.maximum.parts, x.shape[-1]
        if not count:
            return [slice(0, keys // 2), slice(keys // 2, keys)]
        size = self.numerics.softmax.block_n or max(keys, 1)
        at = (x > -math.inf).flatten(0, 1).any(0).nonzero()
        first, last = (int(at[0]) // size, int(at[-1]) // size + 1) if len(at) else (0, 0)
        length = max(-(-(last - first) // count), 1) * size
        starts = range(first * size, last * size, length)
        return [slice(start, min(start + length, keys)) for start in starts] or [slice(0, 0)]

    def eager(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax of complete rows, then one product; x in natural units."""
        top = x.amax(-1, keepdim=True) if x.shape[-1] else x.new_full((*x.shape[:2], 1), -math.inf)
        top = self.raised(top, LOG2E)
        top = torch.where(top == -math.inf, 0.0, top)
        p = self.exp2((x - top).double() * LOG2E, self.sign(x, v))
        total = self.add_up(p, torch.zeros_like(top))
        start = x.new_zeros(*x.shape[:2], v.shape[-1])
        out = self.weigh_parts(self.divide(p, total), v, slice(0, v.shape[1]), start)
        return out, self.log_sum(top, total, natural=True)

    def split(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Each half of the keys, or as many parts as declared, separately, merged by their LSE in
        fp32."""
        parts = [self.walk(x[..., s], v[:, s]) for s in self.parts(x)]
        if self.numerics.output.split_keys == "input":
            parts = [(self.round(out, self.problem.dtype), lse) for out, lse in parts]
        logs = torch.stack([lse for _, lse in parts])
        top = logs.amax(0).clamp(min=torch.finfo(torch.float32).min)
        weights = torch.exp(logs - top)
        lse = top + torch.log(weights.sum(0))
        shares = torch.exp(logs - lse.clamp(min=torch.finfo(torch.float32).min))
        return sum(
            (share[..., None] * out for share, (out, _) in zip(shares, parts, strict=True)),
            self.number(0.0),
        ), lse
