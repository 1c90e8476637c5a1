"""The rows of which statistics and strengths read all weights: of one case, and of many at once.

Which rows these are depends on a case's seed.  So each case's rows of Q are gathered, and the cases
are one problem with more sequences, as in `verify.judging.stacked`; its mask is asked at the rows
that they are.  Scores that depend on where a row is exclude a case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from references.definition import Attention
from references.masks import Full
from references.masks.base import Atom, Device, Mask, MaskMod
from references.masks.base import Interval as MaskInterval
from references.premises import Premise
from references.row_blocks import RowBlock, row_blocks
from verify.judging.stacked import stacked, together
from verify.judging.trial import Trial
from verify.problem import Problem
from verify.problem.premises import broken
from verify.statistics.rows import chosen, unsuited

# Numbers of the largest tensor of one stack; some twenty of them live at once.  It is one block of
# `row_blocks`, as each of its cases is alone.
_MOST = 1 << 18
_NEEDED = frozenset({Premise.POSITION_FREE_SCORES})


@dataclass(frozen=True, eq=False)
class _At(Mask):
    """A mask whose row r of sequence b is row `rows[b, r]` of another mask of so many rows."""

    mask: Mask
    rows: Tensor  # int64 (sequences, rows)
    length: int
    kind: ClassVar[str] = "at"

    @property
    def name(self) -> str:
        """For messages; no case has this mask."""
        return f"rows of {self.mask.name}"

    def mod(self, seqlen_q: int, seqlen_kv: int, device: Device = "cpu") -> MaskMod:
        own, rows = self.mask.mod(self.length, seqlen_kv, device), self.rows.to(device)
        return lambda b, h, q, k: own(b, h, rows[b, q], k)

    def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> MaskInterval | None:
        return self.mask.interval(self.length, seqlen_kv, b, self.rows[b, q])

    @property
    def atoms(self) -> tuple[Atom, ...]:
        """Itself: nothing asks for its parts."""
        return (cast(Atom, self),)

    def check(self, batch: int) -> None:
        """Raise ValueError unless the batch is that of the rows, and of the mask."""
        self.mask.check(batch)
        if batch != len(self.rows):
            raise ValueError(f"mask: rows of {len(self.rows)} sequences, of {batch}")


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Some rows of so many cases of one shape, and what is known of these rows.

    problem: the cases as one.  known: by name, tensors (heads, rows, ...) beside the block's.
    """

    problem: Problem
    cases: int
    block: RowBlock
    known: Mapping[str, Tensor]

    def sampled(self, count: int) -> tuple[slice, dict[str, Tensor]]:
        """About so many rows of each case, at least one of each head, evenly spaced: which, and
        what is known of them."""
        own = slice(None, None, max(self.block.row_max.numel() // self.cases // count, 1))
        return own, {name: x[:, own] for name, x in self.known.items()}


def positions_of(p: Problem) -> Tensor:
    """Of the rows of a problem that are read, int64; none where no row is suited."""
    if unsuited(p) is not None:
        return torch.zeros(0, dtype=torch.int64)
    heads = p.batch * p.heads_q
    work = float(heads * p.seqlen_kv * 3 * (p.head_dim + p.head_dim_v))
    return chosen(p.seqlen_q, heads, work, p.seed)


def results_of(trial: Trial) -> dict[str, Tensor]:
    """What is known of all rows of a trial: O and LSE, natural, as the kernel wrote them, their
    exact values and bounds, (batch, heads_q, seqlen_q, ...)."""
    truth, run = trial.truth, trial.first
    assert run.out is not None
    found = {"out": truth.out, "out_bound": truth.out_bound, "got_out": run.out}
    found |= {"lse": truth.lse, "lse_bound": truth.lse_bound}
    return found if run.lse is None else found | {"got_lse": trial.natural_lse(run.lse)}


def of_block(trial: Trial, block: RowBlock, results: Mapping[str, Tensor]) -> BlockRows:
    """The rows of one block of one case.  results: of all rows, (batch, heads_q, seqlen_q, ...)."""
    heads = block.index[0]
    known = {name: x.flatten(0, 1)[heads][:, block.rows] for name, x in results.items()}
    return BlockRows(trial.problem, 1, block, known)


def stacks_of(
    trials: Sequence[Trial], positions: Callable[[Problem], Tensor] = positions_of
) -> Iterator[list[Trial]]:
    """Those of a stack of launched cases that read rows, as many as are read at once.  The others
    are alone, or read none.  positions: of the rows that each case reads."""
    p = trials[0].problem
    if broken(_NEEDED, p) is not None:
        return
    reading = [trial for trial in trials if len(positions(trial.problem))]
    if not reading:
        return
    rows = len(positions(reading[0].problem))
    size = p.batch * p.heads_q * max(rows * p.seqlen_kv, p.seqlen_kv * p.head_dim_v, 1)
    most = _MOST // size
    for start in range(0, len(reading), max(most, 1)):
        stack = reading[start : start + most]
        if len(stack) > 1:
            yield stack


def of_stack(
    stack: Sequence[Trial],
    results: Callable[[Trial], Mapping[str, Tensor]] = results_of,
    positions: Callable[[Problem], Tensor] = positions_of,
) -> BlockRows:
    """The rows of a stack that `stacks_of` gave, in one block.  results: of all rows of a case, as
    `of_block` gets them."""
    p = stacked([trial.problem for trial in stack])
    chosen_ones = torch.stack([positions(trial.problem) for trial in stack])
    rows = chosen_ones.repeat_interleave(stack[0].problem.batch, 0)
    index = torch.arange(len(rows))[:, None, None], torch.arange(p.heads_q)[:, None], rows[:, None]
    q, k, v = (together([trial.expanded[n] for trial in stack]) for n in range(3))
    mask = p.mask if isinstance(p.mask, Full) else _At(p.mask, rows, p.seqlen_q)
    attention = Attention(mask, p.scale, p.score_mod)
    (block,) = row_blocks(q[index], k, v, attention)
    found = [results(trial) for trial in stack]
    known = {name: together([own[name] for own in found])[index].flatten(0, 1) for name in found[0]}
    return BlockRows(p, len(stack), block, known)
