"""Poison for a backward: inputs that keep the gradients of some rows and keys as they are.

The derivation is in verify/oracles/poison.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from references.masks import Lengths, intersect
from verify.cell.arena import bits
from verify.judging.trial import Trial
from verify.problem import Problem
from verify.problem.inputs import Inputs
from verify.problem.refusal import inside
from verify.tolerance import backward
from verify.tolerance.gradients_arithmetic import GradientArithmetic
from verify.variant import Support

HUGE = 2.0**14
"""An element of a poisoned row, where no sum of its products can overflow then."""

_ROOM = 4.0  # what sums stay below the overflow by: of partial sums, and of dP - delta
_LOG2_E = math.log2(math.e)
_SCRAMBLE = 0x9E3779B1  # odd: another choice for the pivot key than for the pivot row


@dataclass(frozen=True)
class GradientPoisoning:
    """Poisoned inputs (dO among `inputs.others`), how many rows of Q, K, V and dO they spoil, and
    the rows whose gradient must stay as it is.

    kept: by gradient, booleans: dq (batch, heads_q, seqlen_q), dk and dv (batch, heads_kv,
    seqlen_kv).
    """

    inputs: Inputs
    count: int
    kept: Mapping[str, Tensor]


def special_value(problem: Problem) -> float:
    """NaN, or in some cases an infinity."""
    return float("inf") if problem.format.has_infinity and problem.seed & 2 else float("nan")


def spoil(stored: Tensor, used: Tensor, poison: float) -> tuple[Tensor, Tensor]:
    """Return a stored tensor with poison in the rows that no sequence or head uses, and the mask of
    these rows."""
    for dim in (0, 1):
        if stored.shape[dim] == 1:
            used = used.any(dim, keepdim=True)
    result = stored.clone()
    # as bits: torch cannot assign 8-bit floats
    bits(result)[~used] = bits(torch.tensor(poison, dtype=stored.dtype))
    return result, ~used


def keys_read(p: Problem, seen: Tensor) -> Tensor:
    """Keys that some row of their sequence and key head sees, booleans (batch, heads_kv,
    seqlen_kv); seen: those of each row, (batch, heads_q, seqlen_q, seqlen_kv)."""
    return _of_group(p, seen.any(2))


def between_read(read: Tensor) -> Tensor:
    """`keys_read`, and the keys that lie between two of them: what is left is padding."""
    after = read.cumsum(-1) > 0
    before = read.flip(-1).cumsum(-1).flip(-1) > 0
    return after & before


def padded(problem: Problem, support: Support) -> Problem:
    """The problem with a key and a row at its end that are padding, where it has no such and the
    support has lengths for it."""
    p = problem
    if not p.pairs or min(p.seqlen_q, p.seqlen_kv) < 2:
        return p
    seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
    if not bool(keys_read(p, seen).all()) and not bool(seen.any(-1).all()):
        return p
    rows, keys = (
        tuple(n - 1 - (p.seed + b) % max(n // 3, 1) for b in range(p.batch))
        for n in (p.seqlen_q, p.seqlen_kv)
    )
    candidate = p.but(mask=intersect(p.mask, Lengths(rows, keys)))
    return candidate if inside(support, candidate) else p


def gradient_poisoning(trial: Trial) -> GradientPoisoning:
    """Return the trial's poisoning, computed once."""
    return trial.noted("poison_backward", _poison)


def _poison(trial: Trial) -> GradientPoisoning:
    """Poison the keys that a row, the pivot, does not see, and the rows that do not see one of its
    keys: so that row and that key are not touched."""
    p, allowed = trial.problem, trial.declaration.contract.masked_values_backward
    a = arithmetic(trial)
    seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
    live, read = seen.any(-1), keys_read(p, seen)
    used_keys, used_rows = _pivots(p, seen) if p.pairs else (read, live)
    huge = _huge_values(trial, a)
    inputs, dout = trial.inputs, trial.dout
    k, k_spoiled = spoil(inputs.k, used_keys, huge["k"])
    v, v_spoiled = spoil(inputs.v, used_keys, huge["v"])
    q, q_spoiled = spoil(inputs.q, used_rows, huge["q"])
    dout, dout_spoiled = spoil(dout, used_rows, huge["dout"])
    if allowed != "finite":
        special = special_value(p)
        clean = used_keys if allowed == "any" else between_read(read)
        k, v = (spoil(x, clean, special)[0] for x in (k, v))
        q, dout = (spoil(x, live, special)[0] for x in (q, dout))
    keys = (k_spoiled.expand(read.shape) | v_spoiled.expand(read.shape)).contiguous()
    rows = q_spoiled.expand(live.shape) | dout_spoiled
    counted = (q_spoiled, k_spoiled, v_spoiled, dout_spoiled)
    return GradientPoisoning(
        replace(inputs, q=q, k=k, v=v, others={**inputs.others, "dout": dout}),
        sum(int(each.sum()) for each in counted),
        _kept(p, seen, keys, rows, by_softmax=a.sums_delta or trial.declaration.undeclared),
    )


def arithmetic(trial: Trial) -> GradientArithmetic:
    """The arithmetic that the backward on trial declares."""
    declared = trial.declaration.gradients
    assert declared is not None
    a = backward.resolve(declared, trial.config, trial.problem, trial.arch)
    return backward.anyhow(a) if trial.declaration.undeclared else a


def _kept(
    p: Problem, seen: Tensor, keys: Tensor, rows: Tensor, *, by_softmax: bool
) -> dict[str, Tensor]:
    """Rows and keys whose gradients do not depend on poisoned keys and rows.

    by_softmax: a row that sees a poisoned key has no P, or no delta, that is known.
    """
    of_heads = keys.repeat_interleave(p.group, 1)
    touched = rows | (seen & of_heads[:, :, None]).any(-1)
    spread = touched if by_softmax else rows
    reached = _of_group(p, (seen & spread[..., None]).any(2))
    unread = ~keys_read(p, seen)
    kept = ~(keys | reached) | unread
    return {"dq": ~touched | ~seen.any(-1), "dk": kept, "dv": kept}


def _pivots(p: Problem, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Keys that the pivot row of their key head sees, (batch, heads_kv, seqlen_kv), and rows that
    see the pivot key of it, (batch, heads_q, seqlen_q): a key that some row does not see, if there
    is one."""
    by_head = seen.reshape(p.batch, p.heads_kv, p.group, p.seqlen_q, p.seqlen_kv).any(2)
    row = _nth(by_head.any(-1), p.seed)
    keys = by_head.take_along_dim(row[..., None, None], 2)[:, :, 0]
    hidden = keys & _of_group(p, (seen.any(-1, keepdim=True) & ~seen).any(2))
    choice = torch.where(hidden.any(-1, keepdim=True), hidden, keys)
    key = _nth(choice, p.seed * _SCRAMBLE >> 16).repeat_interleave(p.group, 1)
    return keys, seen.take_along_dim(key[..., None, None], 3)[..., 0]


def _nth(where: Tensor, number: int) -> Tensor:
    """The place of a true element along the last dimension, the `number`-th in turn; 0 without
    one."""
    count = where.sum(-1, keepdim=True)
    wanted = number % count.clamp(min=1) + 1
    return ((where.cumsum(-1) == wanted) & where).int().argmax(-1)


def _of_group(p: Problem, found: Tensor) -> Tensor:
    """Booleans of query heads and keys as those of key heads: true if of any head of the group."""
    return found.reshape(p.batch, p.heads_kv, p.group, p.seqlen_kv).any(2)


def _huge_values(trial: Trial, a: GradientArithmetic) -> dict[str, float]:
    """The element of a poisoned row of each input: so large that a weight of 2^-14 shows, and so
    small that every score, dP and delta is finite, of two poisoned rows, too.

    An infinite one spreads honestly, since a hidden P of 0 multiplies it.
    """
    p = trial.problem
    if not p.pairs:
        return dict.fromkeys(("q", "k", "v", "dout"), min(HUGE, p.format.max))
    narrow = [a.narrow.overflow] if a.narrow else []
    scale = max(abs(p.scale) * _LOG2_E, 1.0)
    scores = min(a.scores.domain(p.head_dim), *narrow, math.inf) / (_ROOM * scale)
    kept = [a.delta.overflow] if a.delta else []
    factors = min(a.scores.domain(p.head_dim_v), *narrow, *kept, math.inf)
    factors /= _ROOM * max(abs(p.scale), 1.0)
    # an operand that the scale multiplies must not overflow itself
    most = min(HUGE, p.format.max, a.operands.dtype.max / (2 * scale) if a.prescaled else HUGE)
    most = min(most, a.operands.dtype.max / (2 * scale) if a.alpha else HUGE)
    q, k, v = (x.double() for x in trial.expanded)
    huge: dict[str, float] = {}
    huge["k"] = min(most, _below(scores, _widest(q)))
    huge["q"] = min(most, _below(scores, max(_widest(k), huge["k"] * p.head_dim)))
    huge["v"] = min(HUGE, p.format.max, _below(factors, _widest(trial.dout.double())))
    saved = trial.start[0].double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    largest = max(_widest(v), huge["v"] * p.head_dim_v, _widest(saved))
    huge["dout"] = min(HUGE, p.format_out.max, _below(factors, largest))
    return {name: math.ldexp(1.0, math.frexp(value)[1] - 1) for name, value in huge.items()}


def _widest(x: Tensor) -> float:
    """The largest sum of magnitudes in a row."""
    return float(x.abs().sum(-1).max()) if x.numel() else 0.0


def _below(limit: float, size: float) -> float:
    """The largest number whose products with a row of that size add up to no more than a limit."""
    return limit / max(size, 1.0)
