"""Parts of a problem: ranges of its sequences, heads, queries and keys, as separate problems."""

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
    """The problem with its mask, with only the `Lengths` in it, or without a mask: the first one
    that is supported and good; None if there is none."""
    lengths = intersect(*(atom for atom in problem.mask.atoms if isinstance(atom, Lengths)))
    for mask in dict.fromkeys((problem.mask, lengths, Full())):
        candidate = problem.but(mask=mask)
        if inside(support, candidate) and good(candidate):
            return candidate
    return None


def no_full_mask(support: Support) -> str | None:
    """Why a relation that needs a problem without a mask cannot be tested, or None."""
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
        """The whole problem, except for the given ranges."""
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
        """The problem of this part alone, with a mask that shows the same pairs; None if the
        support has no such mask."""
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
        """Masks that can show this part the pairs of `atom`, those of its kind first.  The caller
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
        """This part of a tensor with heads_q and queries: out, lse, dq, dout or a bound of them."""
        return _stored(tensor, (self.batch, self.heads_q(whole), self.rows))

    def gradient(self, whole: Problem, name: str, tensor: Tensor) -> Tensor:
        """This part of the tensor `name`: of keys for dk and dv, of queries for all others."""
        return (
            _stored(tensor, (self.batch, self.heads_kv, self.keys))
            if name in ("dk", "dv")
            else self.result(whole, tensor)
        )


def _cut(chosen: range) -> slice:
    return slice(chosen.start, chosen.stop)


def _stored(tensor: Tensor, ranges: Sequence[range]) -> Tensor:
    """Ranges of the leading dimensions of a stored tensor; batch and heads of size 1 can stand for
    all (see `Inputs`)."""
    for dim, chosen in enumerate(ranges):
        shared = dim < 2 and tensor.shape[dim] == 1 and chosen.stop > 1
        tensor = tensor.narrow(dim, 0 if shared else chosen.start, 1 if shared else len(chosen))
    return tensor
