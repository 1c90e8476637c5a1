"""Trials whose kernel is a Python function in this process: complete oracles, with their further
launches, in milliseconds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from references.score_mods import cap_of
from tests.harness.declared import flat_numerics
from tests.harness.fake_trials import OK
from verify.cell.arena import Arena
from verify.cell.process import Cell
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.problem import Problem
from verify.variant import Config, Contract, Declaration, Numerics, Support

SUPPORT = Support(
    dtypes=("float16", "bfloat16", "float32"),
    head_dims=range(8, 129),
    masks=("full", "causal", "causal.tl", "window", "lengths"),
    intersections=True,
    grouped_heads=True,
    separate_head_dim_v=True,
    min_seqlen=0,
    score_mods=("softcap",),
)
FLOAT32 = torch.float32
_calls = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A forward in fp32, blocks of 64 keys at once, un-normalised P in the input's dtype; every
    field is a way to differ."""

    score_accumulator: torch.dtype = FLOAT32
    value_accumulator: torch.dtype = FLOAT32
    # instead: 13 fraction bits, added to one in fp32 after so many products (0: never)
    fixed: int | None = None
    group: int = 16  # products that are added before a narrow accumulator is rounded
    scores: torch.dtype = FLOAT32
    prescale: bool = False
    operands: Callable[[Tensor], Tensor] = lambda x: x
    probability: torch.dtype | None = None
    rounded_sum: bool = False
    exp: Callable[[Tensor], Tensor] = torch.exp
    maximum: Callable[[Tensor], Tensor] = lambda s: s.amax(-1, keepdim=True)
    lse: Callable[[Tensor, Tensor, Tensor, float], Tensor] = lambda natural, top, total, scale: (
        natural
    )
    empty_out: float | str = 0.0
    empty_lse: float = -math.inf
    seen: Callable[[Problem], Tensor] = lambda p: p.mask.dense(
        p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv
    )
    cap: Callable[[Tensor, float], Tensor] = lambda s, c: c * torch.tanh(s / c)
    cap_after_mask: bool = False
    heads: Callable[[Problem], tuple[Tensor, Tensor]] = lambda p: (
        (torch.arange(p.heads_q) // p.group,) * 2
    )
    spoil: Callable[[Tensor, Problem, int], Tensor] = lambda out, p, call: out
    masked_zero: bool = True  # masked keys reach P V as 0 * V

    def __call__(self, p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """O and LSE from stored inputs."""
        of_k, of_v = self.heads(p)
        q = given["q"].expand(p.shape_q)
        k, v = (
            given["k"].expand(p.shape_k)[:, of_k].float(),
            given["v"].expand(p.shape_v)[:, of_v].float(),
        )
        seen = self.seen(p)
        if self.prescale:
            s = self.product((q * p.scale).float(), k.mT, self.score_accumulator)
        else:
            s = self.product(self.operands(q.float()), self.operands(k).mT, self.score_accumulator)
            s = s.to(self.scores).float() * p.scale
        cap = cap_of(p.score_mod)
        if cap and not self.cap_after_mask:
            s = self.cap(s, cap)
        s = s.masked_fill(~seen, -math.inf)
        if cap and self.cap_after_mask:
            s = self.cap(s, cap)
        top = self.maximum(s) if p.seqlen_kv else s.new_full((*s.shape[:-1], 1), -math.inf)
        weights = self.exp(s - top.clamp(min=torch.finfo(FLOAT32).min))
        rounded = weights.to(self.probability or given["v"].dtype).float()
        total = (rounded if self.rounded_sum else weights).sum(-1, keepdim=True)
        hidden = v if self.masked_zero else v.nan_to_num(0.0)
        out = self.product(rounded, hidden, self.value_accumulator) / total
        if not self.masked_zero:
            out = out.masked_fill(seen.float() @ v.isnan().float() > 0, math.nan)
        empty = ~seen.any(-1)
        mean = (
            v.mean(2, keepdim=True).expand(out.shape)
            if self.empty_out == "mean"
            else out.new_tensor(self.empty_out)
        )
        out = torch.where(empty[..., None], mean, out)
        lse = self.lse((top + total.log())[..., 0], top[..., 0], total[..., 0], p.scale)
        return {
            "out": self.spoil(out, p, next(_calls)).to(p.format_out.torch),
            "lse": lse.masked_fill(empty, self.empty_lse).float(),
        }

    def product(self, a: Tensor, b: Tensor, accumulator: torch.dtype) -> Tensor:
        """a @ b, in fp32 or with an accumulator that is rounded after every `group` products."""
        if self.fixed is not None:
            every = self.fixed or a.shape[-1]
            parts = [range(n, min(n + every, a.shape[-1])) for n in range(0, a.shape[-1], every)]
            return sum(
                (self.aligned(a[..., part], b[..., part, :]) for part in parts), torch.zeros(())
            )
        if accumulator == FLOAT32:
            return (a.double() @ b.double()).float()
        total = torch.zeros(*a.shape[:-1], b.shape[-1])
        for start in range(0, a.shape[-1], self.group):
            part = slice(start, start + self.group)
            total = (
                (total.double() + a[..., part].double() @ b[..., part, :].double())
                .to(accumulator)
                .float()
            )
        return total

    @staticmethod
    def aligned(a: Tensor, b: Tensor) -> Tensor:
        """a @ b in a unit that adds 32 products and its accumulator, cut to 13 fraction bits of the
        largest."""
        total = torch.zeros(*a.shape[:-1], b.shape[-1], 1, dtype=torch.float64)
        for start in range(0, a.shape[-1], 32):
            part = slice(start, start + 32)
            terms = torch.cat(
                [
                    total,
                    a[..., part].double()[..., None, :]
                    * b[..., part, :].double().mT[..., None, :, :],
                ],
                -1,
            )
            last = torch.exp2(torch.frexp(terms.abs().amax(-1, keepdim=True))[1] - 14.0)
            total = torch.where(last > 0, (terms / last).trunc() * last, 0.0).sum(-1, keepdim=True)
        return total[..., 0].float()


@dataclass
class Direct(Trial):
    """A trial that calls `kernel` instead of a cell."""

    kernel: Kernel = field(default_factory=Kernel)

    def _launch(self, entry: str, poison: str, given: Sequence[Mapping[str, Tensor]]) -> Launch:
        (inputs,) = given
        outputs = self.kernel(self.problem, inputs)
        if self.declaration.contract.lse is None:
            del outputs["lse"]
        return Launch(OK, poison, outputs)


NUMERICS = flat_numerics(exp="vexp", block_n=0)


def declared(
    contract: Contract | None = None, numerics: Numerics = NUMERICS, **support: object
) -> Declaration:
    """The kernel's declaration."""
    return Declaration(
        ref="direct",
        path="direct.py",
        source_hash="",
        name="direct",
        family="torch",
        configs=(Config(block_n=64),),
        support=replace(SUPPORT, **support),
        numerics=numerics,
        contract=contract or Contract(batch_invariant=True),
    )


def trial(
    kernel: Kernel, problem: Problem, declaration: Declaration | None = None, arch: str = "cpu"
) -> Direct:
    """A trial of that kernel."""
    declaration = declaration or declared()
    no_cell = cast(Cell, None), cast(Arena, None)
    return Direct(declaration, declaration.configs[0], problem, *no_cell, arch, kernel=kernel)
