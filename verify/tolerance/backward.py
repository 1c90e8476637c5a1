"""Elementwise hard bounds for dQ, dK and dV.  The derivation is docs/tolerance-backward.md; names
follow it.

A backward starts from what the forward saved, O^ and LSE^, which the judge holds: what an exact
backward would make of them is computed, sign included (the *nominal* gradients), and its distance
from the exact gradients is allowed in full.  Around the nominal ones remain the backward's own
errors: exponents (a factor e^(+-delta) on each P), dO V^T, D, dS, the roundings of P and dS, the
three products, and the output.  Every term is a rigorous worst case, not a first-order one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from references.row_blocks import row_blocks
from verify.arithmetic.unit import spilled
from verify.problem import Problem
from verify.problem.visibility import live_rows, measurable
from verify.tolerance.arithmetic import FP32_MAX
from verify.tolerance.gradients_arithmetic import BEST, GradientArithmetic, resolve
from verify.tolerance.gradients_errors import Errors, errors_of
from verify.tolerance.gradients_intervals import Spans
from verify.tolerance.gradients_known import Known
from verify.tolerance.gradients_order import walk
from verify.tolerance.gradients_pairs import Pairs, pairs_by_key, rows_of, within_base_2
from verify.tolerance.gradients_softmax import calm_scores, guarded, row_sums
from verify.tolerance.gradients_sums import Sums, Weights, results, rules_of
from verify.tolerance.gradients_unknown import OwnForward, any_delta, anyhow
from verify.tolerance.intervals import Interval
from verify.tolerance.scratch import room_on

__all__ = [
    "BEST",
    "GradientArithmetic",
    "GradientTruth",
    "OwnForward",
    "anyhow",
    "gradient_truth",
    "kind_of",
    "resolve",
]

# Elements of one (rows, keys) tensor: of whole rows, rows enough in any case to pay for a pass over
# dK and dV; and of a part of their keys, of which some twenty tensors live at once, on a CPU what
# caches hold.
_BUDGET, _ROWS = {"cpu": 2**17, "cuda": 2**24}, 128
_TILE = {"cpu": 2**17, "cuda": 2**24}


@dataclass(frozen=True)
class GradientTruth:
    """Exact gradients and bounds, fp64: dq and dq_bound (batch, heads_q, seqlen_q, head_dim), dk
    and dv like k and v.

    +inf where the declared arithmetic may overflow on the way, or where what was saved is not
    finite: no number is wrong there. best_bounds: those of dq, dk and dv under a second arithmetic,
    where one was given.  intervals: of dq, dk and dv, where the first arithmetic's results lie
    before they are rounded; None for an unknown backward, of which the last rounding is none of
    a number that is known.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dq_bound: Tensor
    dk_bound: Tensor
    dv_bound: Tensor
    best_bounds: tuple[Tensor, Tensor, Tensor] | None = None
    intervals: dict[str, Interval] | None = None

    def to(self, device: torch.device | str) -> GradientTruth:
        """The same on another device."""
        moved = {
            name: getattr(self, name).to(device)
            for name in ("dq", "dk", "dv", "dq_bound", "dk_bound", "dv_bound")
        }
        best = self.best_bounds
        return GradientTruth(
            **moved,
            best_bounds=None
            if best is None
            else (best[0].to(device), best[1].to(device), best[2].to(device)),
            intervals=None
            if self.intervals is None
            else {name: found.to(device) for name, found in self.intervals.items()},
        )


def gradient_truth(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    saved_out: Tensor,
    saved_lse: Tensor,
    *arithmetics: GradientArithmetic,
    unknown: OwnForward | None = None,
) -> GradientTruth:
    """Exact gradients and the bounds of the first arithmetic; a second one gives `best_bounds`.

    q, k, v, dout at their full logical shapes; saved_out (batch, heads_q, seqlen_q, head_dim_v) and
    saved_lse (batch, heads_q, seqlen_q) as the forward saved them, LSE a natural logarithm in fp64;
    the exact ones for an arithmetic with a softmax of its own, and the exact O for one whose D is
    the sum of P dP.  unknown: of a backward without a declaration, which has a softmax of its
    own, and to which the first arithmetic then applies.  Whole rows at once: memory for a block of
    scores, the gradients of the block's heads, and the results, on the inputs' device.
    """
    given = [x.flatten(0, 1) for x in (q, k, v, dout, saved_out, saved_lse.unsqueeze(-1))]
    shapes = [x.shape for x in (q, k, v)] * (1 + len(arithmetics))
    whole = [q.new_zeros(shape, dtype=torch.float64) for shape in shapes]
    flat, group = [x.flatten(0, 1) for x in whole], problem.group
    rules, room = [rules_of(problem, a) for a in arithmetics], room_on(q.device)
    budget = max(_BUDGET[q.device.type], _ROWS * group * problem.seqlen_kv)
    known = arithmetics[0].known_roundings
    ordered = {name for rule in rules for name, each in rule.items() if each.order != "any"}
    spans = Spans.like(whole[:3], arithmetics[0])
    # Masked pairs are of no use, unless a kernel's 0 * inf can spread from one.
    right = any(a.own for a in arithmetics)
    of_weights = any(a.of_weights for a in arithmetics)
    made = None if unknown is None else unknown.flat()
    small = calm_scores(problem, q, k)
    calm = _calm(*given[2:5]) and _finite(problem, saved_lse) and small
    blocks = row_blocks(q, k, v, problem.attention, budget=budget, passing=calm)
    for (start, stop), parts in groupby(
        blocks, key=lambda block: (block.index[0].start, block.index[0].stop)
    ):
        own = slice(start // group, stop // group)
        keys, values = (x[own].to(torch.float64).repeat_interleave(group, 0) for x in given[1:3])
        widest = values.abs().sum(-1).amax(-1)[:, None, None] if values.shape[1] else 0.0
        dk, dv = (
            Sums.zeros(
                stop - start,
                x,
                len(arithmetics),
                turned=True,
                known=name in known,
                ordered=name in ordered,
            )
            for name, x in (("dk", keys), ("dv", values))
        )
        for block in parts:
            of_rows = [given[n][block.index].to(torch.float64) for n in (0, 3, 4, 5)]
            own_rows = rows_of(block, of_rows, widest, right, of_weights)
            dq = Sums.zeros(
                stop - start,
                own_rows.q,
                len(arithmetics),
                known="dq" in known,
                ordered="dq" in ordered,
            )
            own_rows = own_rows if small else guarded(problem, own_rows, keys)
            tiles = partial(
                pairs_by_key, problem, block, own_rows, values, room, _TILE[q.device.type]
            )
            softmaxes = [row_sums(problem, tiles, own_rows, a) for a in arithmetics]
            if made is not None and softmaxes[0] is not None:
                of_block = made.at(block.index)
                softmaxes[0] = any_delta(
                    problem, tiles, own_rows, arithmetics[0], softmaxes[0], of_block
                )
            for own_keys, pairs in tiles():
                if pairs is None:
                    continue
                errors = [
                    errors_of(problem, pairs, a, softmax, sharp=n == 0)
                    for n, (a, softmax) in enumerate(zip(arithmetics, softmaxes, strict=True))
                ]
                three = dq, dk.part(own_keys), dv.part(own_keys)
                if ordered:
                    first = block.index[1].start, own_keys.start
                    walk(pairs, keys[:, own_keys], first, *(each.partial for each in three))
                _add(pairs, errors, keys[:, own_keys], *three)
            for n, result in enumerate(results(dq, [rule["dq"] for rule in rules])):
                flat[3 * n][block.index] = result
            spans.put("dq", block.index, dq, rules[0]["dq"])
        for at, name, sums in ((1, "dk", dk), (2, "dv", dv)):
            for n, result in enumerate(results(sums, [rule[name] for rule in rules])):
                flat[3 * n + at][own] = result
            spans.put(name, own, sums, rules[0][name])
    unasked = [n for n, a in enumerate(arithmetics) if a.overscales(q, k)]
    for x in (x for n in unasked for x in whole[3 * (n + 1) : 3 * (n + 2)]):
        x.fill_(torch.inf)
    if arithmetics[0].score_gradients.spills:
        whole[3] = spilled(whole[3])
    best = (whole[6], whole[7], whole[8]) if len(whole) > 6 else None
    found = spans.found(whole[3:6])
    return GradientTruth(whole[0], whole[1], whole[2], whole[3], whole[4], whole[5], best, found)


def kind_of(
    problem: Problem,
    tensors: Sequence[Tensor],
    arithmetics: Sequence[GradientArithmetic],
) -> tuple[bool, ...]:
    """What `gradient_truth` decides for a whole problem from its values.  It gives problems of one
    kind that are stacked along the batch what each gets alone.

    tensors: q, k, v, dO, O and LSE, as `gradient_truth` gets them.
    """
    q, k, v, dout, out, lse = tensors
    flags = _calm(v, dout, out), _finite(problem, lse), calm_scores(problem, q, k)
    return (*flags, *(a.overscales(q, k) for a in arithmetics))


def _calm(v: Tensor, dout: Tensor, out: Tensor) -> bool:
    """Whether no dP or D^ of any pair is anywhere near an overflow."""
    largest = [float(x.abs().amax()) if x.numel() else 0.0 for x in (v, dout, out)]
    return largest[1] * v.shape[-1] * (largest[0] + largest[2]) < FP32_MAX / 8


def _finite(problem: Problem, lse: Tensor) -> bool:
    """Whether the LSE^ of every row that sees a key is finite, in base 2 too."""
    odd = ~within_base_2(lse)
    return not bool(odd.any()) or (
        measurable(problem) and not bool((odd & live_rows(problem).to(odd.device)).any())
    )


def _add(pairs: Pairs, errors: list[Errors], keys: Tensor, dq: Sums, dk: Sums, dv: Sums) -> None:
    """Each pair's share of the three gradients."""
    p, visible = pairs.block.probabilities, None if pairs.hidden is None else pairs.block.visible
    of_p, of_ds = [e.of_p for e in errors], [e.of_ds for e in errors]
    exact = pairs.nominal if pairs.exact is None else pairs.exact
    known_p, known_ds = (_moved(errors[0].p, p), _moved(errors[0].ds, exact))
    if pairs.exact is None:
        of_scores, of_weights = Weights(pairs.nominal, None, pairs.size), Weights(p, None, p)
    else:
        of_scores = Weights(pairs.exact, pairs.nominal.sub_(pairs.exact), pairs.size)
        of_weights = Weights(p, torch.sub(pairs.weights, p, out=pairs.room.take()), pairs.weights)
    dq.add(of_scores, of_ds, keys, visible, known_ds)
    seen = None if visible is None else visible.mT
    dk.add(of_scores.mT, [e.mT for e in of_ds], pairs.rows.q, seen, _turned(known_ds))
    dv.add(of_weights.mT, [e.mT for e in of_p], pairs.rows.dout, seen, _turned(known_p))


def _moved(known: Known | None, exact: Tensor) -> tuple[Tensor, Tensor] | None:
    """The middles less the exact weights, in their memory, and the half-widths."""
    return None if known is None else (known.middle.sub_(exact), known.half)


def _turned(known: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    return None if known is None else (known[0].mT, known[1].mT)
