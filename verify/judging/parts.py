"""Parts of a problem: ranges of its sequences, heads, queries and keys, as problems of their
own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from references.masks import Atom, Full, Lengths, Mask, View, intersect
from verify.judging.trial import Trial
from verify.problem import Problem
from verify.problem.inputs import Inputs
from verify.problem.refusal import inside
from verify.variant import Support


def with_mask(
    problem: Problem, support: Support, good: Callable[[Problem], bool]
) -> Problem | None:
    """The problem with its own mask, with what of it is `Lengths`, or with none: the first that is
    supported and good."""
    lengths = intersect(*(atom for atom in problem.mask.atoms if isinstance(atom, Lengths)))
    for mask in dict.fromkeys((problem.mask, lengths, Full())):
        candidate = problem.but(mask=mask)
        if inside(support, candidate) and good(candidate):
            return candidate
    return None


def no_full_mask(support: Support) -> str | None:
    """Why a relation that needs the keys unordered cannot be asked, or None."""
    return None if "full" in support.masks else "supports no problem without a mask"


@dataclass(frozen=True)
class Part:
    """Ranges of a problem's sequences, key heads, queries and keys."""

    batch: range
    heads_kv: range
    rows: range
    keys: range

    @staticmethod
    def of(problem: Problem, **ranges: range) -> Part:
        """The whole problem, but for the ranges given."""
        whole = {
            "batch": range(problem.batch),
            "heads_kv": range(problem.heads_kv),
            "rows": range(problem.seqlen_q),
            "keys": range(problem.seqlen_kv),
        }
        return Part(**(whole | ranges))

    def heads_q(self, problem: Problem) -> range:
        """The query heads that read these key heads."""
        return range(self.heads_kv.start * problem.group, self.heads_kv.stop * problem.group)

    def problem(self, whole: Problem, support: Support) -> Problem | None:
        """The problem of this part alone, under a mask that shows it the same pairs; None if the
        support has none."""
        alone = whole.but(
            batch=len(self.batch),
            heads_q=len(self.heads_q(whole)),
            heads_kv=len(self.heads_kv),
            seqlen_q=len(self.rows),
            seqlen_kv=len(self.keys),
            mask=Full(),
        )
        by_head = any("head" in atom.varies for atom in whole.mask.atoms)
        heads = self.heads_q(whole) if by_head else range(1)
        dense = whole.mask.dense(whole.batch, heads.stop, whole.seqlen_q, whole.seqlen_kv)
        wanted = dense[_cut(self.batch), _cut(heads), _cut(self.rows), _cut(self.keys)]
        for atoms in product(
            *(dict.fromkeys(self._masks(atom, whole)) for atom in whole.mask.atoms)
        ):
            candidate = alone.but(mask=intersect(*atoms))
            if inside(support, candidate) and torch.equal(
                candidate.mask.dense(*wanted.shape), wanted
            ):
                return candidate
        return None

    def _masks(self, atom: Atom, whole: Problem) -> Iterator[Mask]:
        """Masks that may be that one's view of this part, of its own kind if possible; whoever asks
        must compare them."""
        lengths = (whole.seqlen_q, whole.seqlen_kv)
        yield from atom.restrict(View(*lengths, self.batch, self.rows, self.keys))
        yield Full()

    def inputs(self, trial: Trial) -> Inputs:
        """The values of this part, descales included."""
        whole = trial.problem
        own = {
            "q": (self.batch, self.heads_q(whole), self.rows),
            "k": (self.batch, self.heads_kv, self.keys),
            "v": (self.batch, self.heads_kv, self.keys),
        }
        factors = {
            name: _stored(x, (self.batch, self.heads_kv)) for name, x in trial.inputs.others.items()
        }
        q, k, v = (_stored(getattr(trial.inputs, name), ranges) for name, ranges in own.items())
        return Inputs(q, k, v, factors)

    def result(self, whole: Problem, tensor: Tensor) -> Tensor:
        """This part of a tensor by query heads and queries: out, lse, dq, dout and their bounds."""
        return _stored(tensor, (self.batch, self.heads_q(whole), self.rows))

    def gradient(self, whole: Problem, name: str, tensor: Tensor) -> Tensor:
        """This part of a tensor of that name."""
        return (
            _stored(tensor, (self.batch, self.heads_kv, self.keys))
            if name in ("dk", "dv")
            else self.result(whole, tensor)
        )


def _cut(chosen: range) -> slice:
    return slice(chosen.start, chosen.stop)


def _stored(tensor: Tensor, ranges: Sequence[range]) -> Tensor:
    """Ranges of the leading dimensions of a stored tensor; batch and heads of size 1 may stand for
    all (see `Inputs`)."""
    for dim, chosen in enumerate(ranges):
        shared = dim < 2 and tensor.shape[dim] == 1 and chosen.stop > 1
        tensor = tensor.narrow(dim, 0 if shared else chosen.start, 1 if shared else len(chosen))
    return tensor
