"""Plain functions of many honest arithmetics, and faults in them, as kernels of trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tests.harness.in_process import Direct, declared
from tests.harness.in_process import trial as asked
from verify.cell.plain_functions import WEAKEST
from verify.problem import Problem
from verify.variant import Contract

Function = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""(q, k, v, visible, scale) -> O, with as many heads of k and v as of q."""

LOG2_E = math.log2(math.e)
IEEE = replace(WEAKEST, products=replace(WEAKEST.products, float32_products="ieee"))


def plain(function: Function, problem: Problem, lse: Function | None = None) -> Direct:
    """A trial of a plain function; lse: what gives its LSE, if it returns one."""

    def kernel(p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        q, k, v = (given[name].expand(getattr(p, f"shape_{name}")) for name in "qkv")
        k, v = (x.repeat_interleave(p.group, 1) for x in (k, v))
        seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
        found = {"out": function(q, k, v, seen, p.scale), "lse": torch.zeros(p.shape_q[:3])}
        return found if lse is None else found | {"lse": lse(q, k, v, seen, p.scale)}

    contract = Contract(lse=None if lse is None else "natural", nan="any")
    declaration = replace(declared(contract, IEEE, score_mods=()), undeclared=True)
    return asked(kernel, problem, declaration)


def wide_scores(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    return ((q.float() @ k.float().mT) * scale).masked_fill(~seen, -math.inf)


def lse_of(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    return torch.logsumexp(wide_scores(q, k, seen, scale), -1)


def upcast(error: float = 0.0) -> Function:
    """All of it in fp32; the scale is off by a relative `error`."""

    def function(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
        p = torch.softmax(wide_scores(q, k, seen, scale * (1 + error)), -1)
        return (p @ v.float()).to(q.dtype)

    return function


def half_weights(error: float = 0.0) -> Function:
    """P in the inputs' dtype."""

    def function(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
        return torch.softmax(wide_scores(q, k, seen, scale * (1 + error)), -1).to(q.dtype) @ v

    return function


def eager(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """The README's function: everything is rounded."""
    return torch.softmax(((q @ k.mT) * scale).masked_fill(~seen, -math.inf), -1) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """torch's, which dispatches: the flash kernel."""
    mask = None if bool(seen.all()) else seen.contiguous()
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def sdpa_math(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return sdpa(q, k, v, seen, scale)


def rounding(scores: Callable[[Tensor, Tensor, float, Callable[[Tensor], Tensor]], Tensor]):
    """Scores by (q, k, scale, rounding to the dtype), the rest with P in the dtype."""

    def function(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
        found = scores(q.float(), k.float(), scale, lambda x: x.to(q.dtype).float())
        p = torch.softmax(found.masked_fill(~seen, -math.inf), -1)
        return p.to(q.dtype) @ v

    return function


def _root(scale: float) -> float:
    return math.copysign(math.sqrt(abs(scale)), scale)


ROUNDED: Mapping[str, Function] = {
    "eager": eager,
    "scores": rounding(lambda q, k, s, short: short(q @ k.mT) * s),
    "scaled in base 2": rounding(lambda q, k, s, short: short(q @ k.mT * (s * LOG2_E)) / LOG2_E),
    "q": rounding(lambda q, k, s, short: short(q * (s * LOG2_E)) @ k.mT / LOG2_E),
    "k": rounding(lambda q, k, s, short: q @ short(k * s).mT),
    "roots": rounding(lambda q, k, s, short: short(q * _root(s)) @ short(k * abs(_root(s))).mT),
}
"""Honest functions that round operands or scores."""

KEPT: Mapping[str, Function] = {
    "upcast": upcast(),
    "half weights": half_weights(),
    "sdpa": sdpa,
    "sdpa math": sdpa_math,
}
"""Honest functions that do not."""


def _less_maximum(scores: Tensor) -> Tensor:
    top = scores.amax(-1, keepdim=True)
    return scores - torch.where(top == -math.inf, 0.0, top)


def _over(out: Tensor, total: Tensor) -> Tensor:
    return out / torch.where(total == 0, 1.0, total)


def half_exponents(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """S - m, exp, the row sum and the division, each rounded."""
    weights = torch.exp(_less_maximum(wide_scores(q, k, seen, scale)).to(q.dtype))
    return _over(weights, weights.sum(-1, keepdim=True)) @ v


def half_softmax(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """exp, the row sum and the division, each rounded."""
    weights = torch.exp(_less_maximum(wide_scores(q, k, seen, scale))).to(q.dtype)
    return _over(weights, weights.sum(-1, keepdim=True)) @ v


def divided_last(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """As `half_exponents`, but O is divided and not P."""
    weights = torch.exp(_less_maximum(wide_scores(q, k, seen, scale)).to(q.dtype))
    return _over(weights @ v, weights.sum(-1, keepdim=True))


def half_sums(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Sums of 16 products of P V, rounded."""
    p = torch.softmax(wide_scores(q, k, seen, scale), -1).to(q.dtype).float()
    parts = zip(p.split(16, -1), v.float().split(16, 2), strict=True)
    return sum((a @ b).to(q.dtype).float() for a, b in parts).to(q.dtype)


LATER: Mapping[str, Function] = {
    "exponents": half_exponents,
    "softmax": half_softmax,
    "division last": divided_last,
    "sums": half_sums,
}
"""Functions that keep the scores, and round more behind them than the weakest declaration says."""
