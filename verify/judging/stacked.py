"""Reference and bounds of many cases at once: problems of one shape, stacked along the batch.

What a case is judged by depends on nothing but its own heads: every quantity of `RowBlock` and
every bound is made of one head's rows and keys.  So problems that differ in nothing but their
values are one problem with more sequences, and its results are cut apart again: the same numbers as
alone, by as many operations as one case needs.  On a GPU, which waits for launches, sixteen cases
cost the time of one; on a CPU, small cases cost less than half.

A mask that differs between sequences is repeated with its sequences (`Repeated`).

`excludes` names what a stack cannot hold.  A case that it excludes, and one without company, is
left to be computed alone; so is a whole stack whose computation fails, and each of its cases then
fails or not for itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, ClassVar, Protocol, TypeVar, cast

import torch
from torch import Tensor

from references.masks.base import Atom, Device, Mask, MaskMod
from references.masks.base import Interval as MaskInterval
from verify.judging.truth import Answer, Clock, Kept, Truth, compute_truth_on, device_for, on_device
from verify.problem import Layout, Problem
from verify.tolerance.backward import GradientTruth
from verify.tolerance.forward import ForwardArithmetic
from verify.tolerance.intervals import Interval

# Numbers in fp64 of one stack (`_size`).  On a CPU larger stacks gain nothing but cache misses; on
# a GPU some twenty tensors of them live at once, 1.3 GB.
_MOST = {"cpu": 1 << 20, "cuda": 1 << 23}


class Stackable(Protocol):
    """A case of a problem, and its answers."""

    @property
    def problem(self) -> Problem: ...

    @property
    def answers(self) -> list[Any]: ...


C = TypeVar("C", bound=Stackable)
W = TypeVar("W", Truth, GradientTruth)


@dataclass(frozen=True)
class Asked:
    """What is to be known of one case.

    inputs: q, k and v at their full logical shapes, descales applied.  questions: each the
    arithmetics of one `compute_truth`; the answers come in `answers`, in that order, and the
    seconds that they took, shared among the cases of a stack, in `clock`.
    """

    problem: Problem
    inputs: tuple[Tensor, Tensor, Tensor]
    questions: Sequence[Sequence[ForwardArithmetic]]
    answers: list[Answer] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)


def excludes(p: Problem, questions: Iterable[Sequence[ForwardArithmetic]]) -> str | None:
    """Why a case cannot be a part of a stack, or None."""
    if p.quantisation.scaled:
        return "quantisation: the arithmetic depends on the factors"
    if not p.pairs:
        return "no query has a key"
    for a in (a for question in questions for a in question):
        if a.integers is not None or a.columns is not None:
            return "numerics.quantised: steps are those of whole tensors"
    return None


@dataclass(frozen=True)
class Repeated(Mask):
    """A mask for so many sequences, again and again: sequence b is sequence b % batch of it."""

    mask: Mask
    batch: int
    kind: ClassVar[str] = "repeated"

    @property
    def name(self) -> str:
        """For messages; no case has this mask."""
        return f"{self.mask.name}, every {self.batch}"

    def mod(self, seqlen_q: int, seqlen_kv: int, device: Device = "cpu") -> MaskMod:
        own = self.mask.mod(seqlen_q, seqlen_kv, device)
        return lambda b, h, q, k: own(b % self.batch, h, q, k)

    def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> MaskInterval | None:
        return self.mask.interval(seqlen_q, seqlen_kv, b % self.batch, q)

    @property
    def atoms(self) -> tuple[Atom, ...]:
        """Those of the mask, each repeated."""
        parts = self.mask.atoms
        one = parts == (self.mask,)
        repeated = [self] if one else [Repeated(part, self.batch) for part in parts]
        return cast(tuple[Atom, ...], tuple(repeated))

    @property
    def rank(self) -> int:
        """Of an atom, for the order of an intersection."""
        return min(atom.rank for atom in self.mask.atoms)

    def check(self, batch: int) -> None:
        """Raise ValueError unless the batch is a multiple of the mask's own."""
        self.mask.check(self.batch)
        if batch % self.batch:
            raise ValueError(f"mask: a batch of {batch} is no multiple of {self.batch}")


def shape_class(p: Problem) -> Problem:
    """The problem without what may differ in a stack: values, memory, and how many sequences there
    are if all of them have the same mask."""
    return _shape_class(p.plain_valued)


@lru_cache(maxsize=1 << 10)  # cases that are judged together ask for the same one in turn
def _shape_class(p: Problem) -> Problem:
    plain = Layout()
    return p.but(
        batch=p.batch if _by_sequence(p) else 1,
        **{f"layout_{name}": plain for name in p.layouts},
    )


def _by_sequence(p: Problem) -> bool:
    return any("batch" in atom.varies for atom in p.mask.atoms)


def _size(p: Problem) -> int:
    """Numbers of the largest tensors of a problem: scores, or Q, K, V and O at each head."""
    rows = p.batch * p.heads_q * (p.seqlen_q + p.seqlen_kv) * (p.head_dim + p.head_dim_v)
    return max(p.pairs, rows)


def answer(asked: Sequence[Asked]) -> int:
    """Answer the questions of those cases that have company; return how many these are.

    A case without answers has to be computed alone.
    """
    fitting = [case for case in asked if excludes(case.problem, case.questions) is None]
    return answered(stacks(fitting, _alike), _answer)


def answered(stacks: Iterable[list[C]], answer: Callable[[list[C]], None]) -> int:
    """Answer each stack's questions; return how many cases have answers then."""
    count = 0
    for stack in stacks:
        try:
            answer(stack)
        except (RuntimeError, ValueError):  # which of them it was, each will say when it is alone
            for case in stack:
                case.answers.clear()
            continue
        count += len(stack)
    return count


def stacks(
    cases: Iterable[C], alike: Callable[[C, C], bool], cost: float = 1.0
) -> Iterator[list[C]]:
    """Cases of one shape that are alike, two or more, as many as one stack can hold.

    cost: of a case, in products of all its pairs; a stack is the smaller for it.
    """
    kinds: list[tuple[Problem, list[C]]] = []
    for case in cases:
        shape = shape_class(case.problem)
        for known, members in kinds:
            if known == shape and alike(members[0], case):
                members.append(case)
                break
        else:
            kinds.append((shape, [case]))
    for _, members in kinds:
        most = _most(members, cost)
        stack: list[C] = []
        held = 0
        for case in members:
            size = _size(case.problem)
            if stack and held + size > most:
                yield from _several(stack)
                stack, held = [], 0
            stack.append(case)
            held += size
        yield from _several(stack)


def _most(members: Sequence[C], cost: float) -> float:
    """Numbers of one stack of these cases: those of a GPU if a full stack is worth one."""
    most = _MOST["cuda"] / cost
    sizes = itertools.accumulate(_size(case.problem) for case in members)
    full = [case for case, size in zip(members, sizes, strict=True) if size <= most]
    return _MOST[device_for(cost * products(full)).type] / cost


def _several(stack: list[C]) -> Iterator[list[C]]:
    if len(stack) > 1:
        yield stack


def _alike(mine: Asked, other: Asked) -> bool:
    return [list(q) for q in mine.questions] == [list(q) for q in other.questions]


def products(stack: Sequence[Stackable]) -> float:
    """Multiply-adds of the products of all pairs."""
    return float(sum(c.problem.pairs * (c.problem.head_dim + c.problem.head_dim_v) for c in stack))


def stacked(problems: Sequence[Problem]) -> Problem:
    """Problems of one shape as one, in their order."""
    p, mask = shape_class(problems[0]), problems[0].mask
    if _by_sequence(p):
        mask = Repeated(mask, p.batch)
    return p.but(batch=sum(each.batch for each in problems), mask=mask)


def _answer(stack: list[Asked]) -> None:
    first = stack[0]
    counts = [case.problem.batch for case in stack]
    p = stacked([case.problem for case in stack])
    q, k, v = (torch.cat([case.inputs[n] for case in stack]) for n in range(3))
    clock = Clock()

    def compute(device: torch.device) -> list[Truth]:
        kept: Kept = {}
        given = (q.to(device), k.to(device), v.to(device))
        return [
            compute_truth_on(device, p, given, list(question), clock, kept=kept)
            for question in first.questions
        ]

    for question, whole in zip(first.questions, on_device(products(stack), compute), strict=True):
        for case, own in zip(stack, apart(whole, counts), strict=True):
            case.answers.append(Answer(tuple(question), own))
    for case, count in zip(stack, counts, strict=True):
        case.clock.share(clock, count / p.batch)


def apart(whole: Truth, counts: Sequence[int]) -> Iterator[Truth]:
    """The parts of a truth that have so many sequences, in their order: views.

    Raises ValueError if these are not all of its sequences.
    """
    if sum(counts) != len(whole.out):
        raise ValueError(f"counts: {list(counts)} are not {len(whole.out)} sequences")
    return parts_of(whole, counts)


def parts_of(whole: W, counts: Sequence[int]) -> Iterator[W]:
    """The parts of a truth, forward or backward, that have so many sequences, in their order:
    views."""
    names = [f.name for f in fields(whole)]
    cut = (_cut(getattr(whole, name), counts) for name in names)
    for own in zip(*cut, strict=True):
        yield replace(whole, **dict(zip(names, own, strict=True)))


def together(parts: Sequence[Tensor]) -> Tensor:
    """Tensors of several cases along the batch; of one case, its own.  Parts that follow each other
    in one tensor, as `parts_of` cuts it, are not copied."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if not first.numel() or not _follow(parts):
        return torch.cat(list(parts))
    rows, row = sum(part.shape[0] for part in parts), first.numel() // first.shape[0]
    return first.as_strided((rows, *first.shape[1:]), (row, *first.stride()[1:]))


def _follow(parts: Sequence[Tensor]) -> bool:
    """Whether these follow each other, without a gap, in the memory of the first one's tensor."""
    first = parts[0]
    end, memory = first.data_ptr(), first.untyped_storage()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous():
            return False
        end += part.numel() * part.itemsize
    return end <= memory.data_ptr() + memory.nbytes()


def joined(parts: Sequence[W]) -> W:
    """Truths of one shape as one, in their order: what `parts_of` cuts apart."""
    if len(parts) == 1:
        return parts[0]
    names = [f.name for f in fields(parts[0])]
    return replace(parts[0], **{name: _join([getattr(x, name) for x in parts]) for name in names})


def _join(parts: Sequence[Any]) -> Any:
    """Tensors, or several of each, put together along the batch; None if the first is."""
    first = parts[0]
    if isinstance(first, Interval):
        return Interval(_join([x.middle for x in parts]), _join([x.reach for x in parts]))
    if isinstance(first, tuple):
        return tuple(_join(each) for each in zip(*parts, strict=True))
    if isinstance(first, dict):
        return {name: _join([x[name] for x in parts]) for name in first}
    return None if first is None else together(parts)


def _cut(x: Any, counts: Sequence[int]) -> Sequence[Any]:
    """A tensor, or each of several, by so many sequences at a time."""
    if x is None:
        return [None] * len(counts)
    if isinstance(x, Interval):
        pairs = zip(_cut(x.middle, counts), _cut(x.reach, counts), strict=True)
        return [Interval(middle, reach) for middle, reach in pairs]
    if isinstance(x, tuple):
        return _each(x, counts)
    if isinstance(x, dict):
        return [dict(zip(x, own, strict=True)) for own in _each(x.values(), counts)]
    cut: Sequence[Tensor] = x.split(list(counts))
    return cut


def _each(several: Collection[Any], counts: Sequence[int]) -> Sequence[tuple[Any, ...]]:
    """As `_cut`, of each of several."""
    cut = [_cut(x, counts) for x in several]
    return list(zip(*cut, strict=True)) if cut else [()] * len(counts)
