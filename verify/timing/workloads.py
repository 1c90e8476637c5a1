"""Workloads: the shapes that are timed, and how many operations each is said to have.

Conventions, those of the FlashAttention papers: 4 B H Sq Skv D operations forward (two products of
two operations per multiply and add), half of them for a causal mask, 2.5 times as many backward
(five products instead of two).  Operations of a kernel on masked or recomputed tiles do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from references.masks import Causal, Full
from references.quantisation import parse_quantisation
from verify.arithmetic.dtypes import dtype_named
from verify.problem import Problem
from verify.problem.storage import STRIDED, storage_kind
from verify.variant import Declaration, Support

Mask = Literal["full", "causal"]
Direction = Literal["forward", "backward"]
MASKS: tuple[Mask, ...] = ("full", "causal")
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

CAUSAL, BACKWARD = 0.5, 2.5  # of the operations of a full forward
SOFTMAX = 5  # operations per score: scale, maximum, difference, exponential, sum


@dataclass(frozen=True, kw_only=True, order=True)
class Workload:
    """One shape: as many heads of K as of Q, as many keys as queries."""

    direction: Direction = "forward"
    batch: int
    heads: int
    head_dim: int
    seqlen: int
    mask: Mask = "full"

    @property
    def shape(self) -> str:
        """(batch, heads, seqlen, head_dim) as text."""
        return f"({self.batch}, {self.heads}, {self.seqlen}, {self.head_dim})"

    @property
    def name(self) -> str:
        return f"{self.direction} {self.shape} {self.mask}"

    @property
    def kind(self) -> tuple[Direction, int, Mask]:
        """What decides which config is fast, beside the lengths and the number of heads."""
        return self.direction, self.head_dim, self.mask

    @property
    def heads_in_all(self) -> int:
        """Of all batches: how much work there is for each length, which decides, too."""
        return self.batch * self.heads

    @property
    def scores(self) -> float:
        """Scores that count: all of a full mask, half of them of a causal one."""
        share = CAUSAL if self.mask == "causal" else 1.0
        return share * self.batch * self.heads * self.seqlen**2

    @property
    def flops(self) -> float:
        """Operations of the matrix products."""
        return self.scores * 4 * self.head_dim * (BACKWARD if self.direction == "backward" else 1)

    def bytes(self, dtype: str) -> int:
        """The fewest bytes of device memory: each input read once, each output written once."""
        p = self.problem(dtype)
        of = (dtype_named(p.dtype).torch.itemsize, dtype_named(p.dtype_out).torch.itemsize)
        rows = self.batch * self.heads * self.seqlen
        inputs, outputs, lse = 3 * of[0], of[1], 4
        if self.direction == "backward":  # O and dO are read, dQ, dK and dV are written
            inputs, outputs = inputs + 2 * of[1], 3 * of[0]
        return rows * (self.head_dim * (inputs + outputs) + lse)

    def intensity(self, dtype: str) -> float:
        """Operations per byte, the softmax's among them."""
        return (self.flops + SOFTMAX * self.scores) / self.bytes(dtype)

    def problem(self, dtype: str, descaling: str = "none") -> Problem:
        """The problem that is handed to a kernel; descaling: a word of `Support.descalings`."""
        return Problem(
            batch=self.batch,
            heads_q=self.heads,
            heads_kv=self.heads,
            seqlen_q=self.seqlen,
            seqlen_kv=self.seqlen,
            head_dim=self.head_dim,
            dtype=dtype,
            mask=Causal() if self.mask == "causal" else Full(),
            quantisation=parse_quantisation(descaling),
        )

    def problem_for(self, declaration: Declaration, dtype: str) -> Problem | str:
        """The problem as this variant takes it, or why it does not."""
        if self.direction not in declaration.entries:
            return f"has no {self.direction}"
        descalings = declaration.support.descalings
        problem = self.problem(dtype, "none" if "none" in descalings else descalings[0])
        problem = as_stored(problem, declaration.support)
        refusal = declaration.support.refusal(problem)
        return problem if refusal is None else ": ".join(refusal)


def as_stored(problem: Problem, support: Support) -> Problem:
    """The problem with the first storage of a support that takes no strided tensors, in its
    simplest form; any other support leaves it as it is."""
    if STRIDED in support.storages:
        return problem
    storage = storage_kind(support.storages[0])()
    return problem.but(**{f"layout_{name}": storage for name in storage.holds})


@dataclass(frozen=True)
class Suite:
    """Workloads that are timed together.

    row_seconds: for the timed calls of one row; total: for all rows, None without a limit.
    torch_variants: of family torch only these are timed; None: all.
    """

    workloads: tuple[Workload, ...]
    row_seconds: float = 0.5
    total: float | None = None
    torch_variants: frozenset[str] | None = None


def of_shapes(
    shapes: Iterable[tuple[int, int, int, int]],
    directions: tuple[Direction, ...] = DIRECTIONS,
    masks: tuple[Mask, ...] = MASKS,
) -> tuple[Workload, ...]:
    """Workloads of (batch, heads, seqlen, head_dim), each direction and mask."""
    return tuple(
        Workload(
            batch=batch, heads=heads, seqlen=seqlen, head_dim=dim, mask=mask, direction=direction
        )
        for batch, heads, seqlen, dim in shapes
        for direction in directions
        for mask in masks
    )


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """B,H,N,D as numbers.  Raises ValueError."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*){3}", text, re.ASCII):
        raise ValueError(f"{text!r} is not B,H,N,D: batch, heads, length and head dim from 1")
    batch, heads, seqlen, dim = map(int, text.split(","))
    return batch, heads, seqlen, dim


_COMPARED = [(1, 8, 8192, 64), (1, 48, 8192, 64), (1, 48, 8192, 512), (1, 48, 16384, 512)]
_DOUBLED = [512 << step for step in range(6)]  # 512 to 16384
# torch's own, beside which a fast suite puts the collection's kernels
_BASELINES = frozenset(
    f"torch-{name}{backward}"
    for name in ("flash", "cudnn", "efficient", "math")
    for backward in ("", "-backward")
) | {"torch-efficient-causal", "torch-efficient-backward-causal"}

SUITES = {
    "quick": Suite(
        of_shapes(_COMPARED, ("forward",)) + of_shapes([(4, 32, 4096, 128)]),
        row_seconds=0.15,
        total=75.0,
        torch_variants=_BASELINES,
    ),
    "shapes": Suite(of_shapes(_COMPARED, ("forward",))),
    "protocol": Suite(of_shapes([(1, 32, seqlen, 128) for seqlen in _DOUBLED])),
    "batched": Suite(
        of_shapes([(4, 32, seqlen, dim) for dim in (64, 128) for seqlen in _DOUBLED[1:]])
    ),
}
# One of each in turn, so that a run that is cut has rows of all.
_DEALT = zip_longest(*(suite.workloads for suite in SUITES.values()))
SUITES["all"] = Suite(tuple(dict.fromkeys(one for several in _DEALT for one in several if one)))
SUITES["cpu"] = Suite(
    of_shapes([(1, 4, 512, 64), (1, 4, 1024, 64), (1, 4, 1024, 128)]),
    row_seconds=0.5,
    total=75.0,
)
