"""Long sequences: the selection of rows and keys, the judgement of results there, and their
gradients.

The derivation is in docs/long-sequences.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from references.row_blocks import RowBlock, row_blocks
from verify.arithmetic.dtypes import DType
from verify.evidence import Finding
from verify.judging.comparison import compare
from verify.judging.findings import convict, place, worst
from verify.problem import Problem
from verify.problem.source import Source
from verify.problem.visibility import live_rows
from verify.tolerance.gradients_arithmetic import GradientArithmetic
from verify.tolerance.gradients_errors import errors_of
from verify.tolerance.gradients_pairs import Rows, pairs_by_key, pairs_of, rows_of
from verify.tolerance.gradients_softmax import calm_scores, guarded
from verify.tolerance.gradients_sums import Sums, Weights, results, rules_of
from verify.tolerance.scratch import room_on

COUNT = 96  # rows, or keys, that are judged in each sequence and head
_TILES = (64, 128)
_STEP = 1 << 15  # 16-bit indices overflow here (signed) and at twice this length
# Elements of one (rows, keys) tensor: of whole rows; and of a tile, of which about twenty tensors
# exist at once.
_WHOLE = {"cpu": 1 << 23, "cuda": 1 << 24}
_TILE, _ROWS = {"cpu": 1 << 17, "cuda": 1 << 22}, 64


def positions(problem: Problem, side: str) -> Tensor:
    """The selected positions of "rows" (queries) or "keys": int64, ascending; all if there are at
    most `COUNT`.

    They are the ends, the edges of the first and last tiles, and the neighbours of powers of two
    and of multiples of 32768; the rest is drawn from the problem's seed.
    """
    length = problem.seqlen_q if side == "rows" else problem.seqlen_kv
    if length <= COUNT:
        return torch.arange(length)
    edges = [1, length, *_TILES, *(length // tile * tile for tile in _TILES)]
    edges += [1 << n for n in range(8, length.bit_length())] + list(
        range(_STEP, min(length, 6 * _STEP), _STEP)
    )
    beside = {edge + side for edge in edges for side in (-1, 0, 1)}
    found = {n for n in beside if 0 <= n < length}
    for word in Source(problem).raw(side, "chosen", COUNT - len(found)).tolist():
        position = word % length
        while position in found:
            position = (position + 1) % length
        found.add(position)
    return torch.tensor(sorted(found))


@dataclass(frozen=True, eq=False)
class Chosen:
    """The exact values and the bounds of a result at selected positions of dimension 2, fp64.

    asked: a mask of the judged elements over leading dimensions; None: all.
    """

    name: str
    at: Tensor  # positions
    want: Tensor
    bound: Tensor
    output: DType
    asked: Tensor | None = None

    def judge(self, oracle: str, whole: Tensor) -> tuple[Finding | None, float]:
        """The finding against a whole raw result if one of its selected elements is out of bounds,
        and the worst r."""
        got = whole.index_select(2, self.at)
        asked = torch.ones_like(got, dtype=torch.bool)
        if self.asked is not None:
            asked = self.asked.view(
                *self.asked.shape, *[1] * (got.dim() - self.asked.dim())
            ).expand(got.shape)
        compared = compare(got, torch.where(asked, self.want, 0.0), self.bound, self.output)
        ratio = torch.where(asked, compared.ratio, 0.0)
        if not ratio.numel():
            return None, 0.0
        largest = float(ratio.max())
        bad = ~(ratio <= 1)
        if not bool(bad.any()):
            return None, largest
        at = worst(ratio)
        value, truth, limit = float(got[at]), float(self.want[at]), float(self.bound[at])
        where = place(self.name.split()[-1], (*at[:2], int(self.at[at[2]]), *at[3:]))
        rows = self.at[bad.flatten(3).any(-1).any(0).any(0) if bad.dim() > 3 else bad.any(0).any(0)]
        message = (
            f"{self.name} is off by {abs(value - truth):.4g}, the bound is {limit:.4g} (r ="
            f" {largest:.3g}): got {value:.9g}, should be {truth:.9g} at {where}; of {len(self.at)}"
            f" chosen positions {len(rows)} are wrong, the first {int(rows[0])}, the last"
            f" {int(rows[-1])}"
        )
        ruling = convict(oracle, message, name=self.name, bad=bad, got=value, bound=limit)
        assert ruling.finding is not None
        return replace(ruling.finding, where=where), largest


@dataclass(frozen=True, eq=False)
class Given:
    """The inputs of a backward, as logical tensors; out and lse as saved, lse as an fp64 natural
    logarithm."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor

    def rows(self, p: Problem, block: RowBlock, keys: Tensor, values: Tensor) -> Rows:
        """The rows of a block, with these keys and values."""
        heads, rows = block.index[0], block.rows.to(self.q.device)
        tensors = (self.q, self.dout, self.out, self.lse[..., None])
        widest = values.abs().sum(-1).amax(-1)[:, None, None] if values.shape[1] else 0.0
        found = rows_of(
            block,
            [x.flatten(0, 1)[heads].index_select(1, rows).to(torch.float64) for x in tensors],
            widest,
        )
        return found if calm_scores(p, self.q, self.k) else guarded(p, found, keys)


def row_gradients(p: Problem, given: Given, a: GradientArithmetic, rows: Tensor) -> Chosen:
    """dQ of the selected rows, from their saved O and LSE and all keys.

    `want` is the nominal gradient of docs/tolerance-backward.md: exact arithmetic on the saved
    values.  The bound is the largest error that a backward can add.
    """
    device, rules, room = given.q.device, [rules_of(p, a)["dq"]], room_on(given.q.device)
    want, bound = given.q.new_zeros(
        2, p.batch * p.heads_q, len(rows), p.head_dim, dtype=torch.float64
    )
    for block in row_blocks(
        given.q, given.k, given.v, p.attention, rows=rows, budget=_WHOLE[device.type]
    ):
        keys, values = (_of_heads(p, x, block) for x in (given.k, given.v))
        own = given.rows(p, block, keys, values)
        sums = Sums.zeros(len(own.q), own.q, 1, ordered=rules[0].order != "any")
        for part, pairs in pairs_by_key(p, block, own, values, room, _TILE[device.type]):
            if pairs is not None:
                _add(
                    sums,
                    pairs.nominal,
                    errors_of(p, pairs, a).of_ds,
                    keys[:, part],
                    pairs.block.visible,
                    part.start,
                )
        want[block.index], bound[block.index] = results(sums, rules)
    if a.overscales(given.q, given.k):
        bound.fill_(math.inf)
    full = (p.batch, p.heads_q, len(rows), p.head_dim)
    return Chosen("dq", rows, want.view(full).cpu(), bound.view(full).cpu(), p.format)


def column_gradients(
    p: Problem, given: Given, a: GradientArithmetic, keys: Tensor
) -> tuple[Chosen, Chosen]:
    """dK and dV of the selected keys, from the saved O and LSE of all rows; see `row_gradients`."""
    device, rules, room = given.q.device, rules_of(p, a), room_on(given.q.device)
    k, v = (x.index_select(2, keys.to(x.device)) for x in (given.k, given.v))
    # dK, dV, and their bounds.
    made = [
        x.new_zeros(p.batch * p.heads_kv, *x.shape[2:], dtype=torch.float64) for x in (k, v, k, v)
    ]
    empty = ~live_rows(p).flatten(0, 1).to(device)
    budget = max(_TILE[device.type], _ROWS * p.group * len(keys))
    blocks = row_blocks(given.q, given.k, given.v, p.attention, columns=keys, budget=budget)
    for (start, stop), parts in groupby(
        blocks, key=lambda block: (block.index[0].start, block.index[0].stop)
    ):
        dk, dv = (
            Sums.zeros(stop - start, x[:1], 1, ordered=rules[name].order != "any")
            for name, x in zip(("dk", "dv"), made[:2], strict=True)
        )
        for found in parts:
            # A row that sees none of these keys is not empty: it can see others.
            block = replace(found, row_max=torch.where(empty[found.index], -math.inf, 0.0))
            values = _of_heads(p, v, block)
            own = given.rows(p, block, _of_heads(p, k, block), values)
            pairs = pairs_of(p, block, own, values, room)
            if pairs is not None:
                errors, seen, first = errors_of(p, pairs, a), block.visible.mT, block.index[1].start
                _add(dk, pairs.nominal.mT, errors.of_ds.mT, own.q, seen, first)
                _add(dv, pairs.weights.mT, errors.of_p.mT, own.dout, seen, first)
        heads = slice(start // p.group, stop // p.group)
        made[0][heads], made[2][heads] = results(dk, [rules["dk"]])
        made[1][heads], made[3][heads] = results(dv, [rules["dv"]])
    if a.overscales(given.q, given.k):
        made[2:] = [torch.full_like(x, math.inf) for x in made[2:]]
    full = [x.view(p.batch, p.heads_kv, *x.shape[1:]).cpu() for x in made]
    return Chosen("dk", keys, full[0], full[2], p.format), Chosen(
        "dv", keys, full[1], full[3], p.format
    )


def _of_heads(p: Problem, x: Tensor, block: RowBlock) -> Tensor:
    """K or V of a block's query heads, fp64 (heads, keys, dim)."""
    own = x.flatten(0, 1)[block.index[0].start // p.group : block.index[0].stop // p.group]
    return own.to(torch.float64).repeat_interleave(p.group, 0)


def _add(
    sums: Sums, nominal: Tensor, errors: Tensor, operand: Tensor, visible: Tensor, first: int
) -> None:
    """Add nominal weights, which have no shift from exact ones, from the `first` term on."""
    if sums.partial is not None:
        sums.partial.add(nominal, operand, visible, first)
    sums.add(Weights(nominal, None, nominal.abs()), [errors], operand, visible)
