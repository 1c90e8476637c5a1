"""Lengths: rows and keys are counted and gathered at lengths beside powers of two up to 8192.

An index that is kept in too few bits, a counter of blocks that wraps and a table of a fixed size
show from some power of two on. Oracles of known answers need no reference there: `counting` counts
the keys of every row, and `gather` names the row of V that O is, so a row or key that is lost,
doubled or taken for another one shows wherever it is. `gather_backward` does the same for the
gradients. So these problems have thousands of keys and few rows, thousands of rows and few keys, or
a narrow window over thousands of both, and cost little. docs/long-sequences.md says which machine
is asked which.

The derivations are those of the oracles counting and gather.

Premises: those of counting and gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from references.masks import Causal, Lengths, Window
from verify.cell.discovery import environment
from verify.oracles import Group, counting, gather
from verify.oracles.long.long_whole import gather_long
from verify.oracles.long.problems import nearest, possible
from verify.problem import Problem
from verify.variant import Declaration

POWERS = (1024, 2048, 4096, 8192)
_BESIDE = tuple(power + side for power in POWERS for side in (-1, 0, 1))
# of kernels that an interpreter runs or that build anew for each length, and of further dtypes
_SOME = (2047, 4096, 8193)
_BAND = 2049  # rows and keys under a narrow window
_WINDOW = Window(3, 0)
_FEW = 5
_DIM = 16


def forward_problems(declaration: Declaration, dtype: str) -> list[Problem]:
    """Return the problems of group "lengths" for a variant and dtype."""
    return possible(declaration.support, _forward(declaration, dtype))


def backward_problems(declaration: Declaration, dtype: str) -> list[Problem]:
    """Return the problems of group "lengths_gradients" for a variant and dtype."""
    return possible(declaration.support, _backward(declaration, dtype))


def _lengths(d: Declaration, dtype: str) -> Sequence[int]:
    """Return the lengths that a variant is asked in a dtype."""
    leads = dtype == d.support.dtypes[0]
    if not leads and environment().device == "cpu":
        return ()
    return _SOME if d.interpreted or d.allocates_outputs or not leads else _BESIDE


def _forward(d: Declaration, dtype: str) -> Iterator[Problem]:
    support, lengths = d.support, _lengths(d, dtype)
    if not lengths:
        return
    most = max(lengths)
    if "lengths" in support.masks:  # all at once, in sequences of one batch
        ragged = Lengths((1,) * len(lengths), tuple(lengths))
        batch = len(lengths)
        yield nearest(
            support, dtype, 1, most, ragged, batch=batch, distribution="counting", head_dim=_DIM
        )
    for n in lengths:
        if "lengths" not in support.masks:
            yield nearest(support, dtype, 1, n, distribution="counting", head_dim=_DIM)
        yield nearest(support, dtype, 3, n, Causal(), distribution="gather", head_dim=_DIM)
        if n == most or not d.interpreted:
            yield nearest(support, dtype, n, _FEW, distribution="gather", head_dim=_DIM)
    yield nearest(support, dtype, _BAND, _BAND, _WINDOW, distribution="gather", head_dim=_DIM)


def _backward(d: Declaration, dtype: str) -> Iterator[Problem]:
    support, lengths = d.support, _lengths(d, dtype)
    known = "gather_integers"
    for n in lengths[-1:] if d.interpreted else lengths:
        yield nearest(support, dtype, 3, n, Causal(), distribution=known, head_dim=_DIM)
        yield nearest(support, dtype, n, _FEW, distribution=known, head_dim=_DIM)
    if lengths:
        yield nearest(support, dtype, _BAND, _BAND, _WINDOW, distribution=known, head_dim=_DIM)


def _affordable(problems: list[Problem]) -> list[Problem]:
    """Return the problems without squares that no window narrows."""
    return [p for p in problems if p.mask == _WINDOW or min(p.seqlen_q, p.seqlen_kv) <= _FEW]


GROUPS = (
    Group(
        name="lengths",
        about="keys are counted and gathered at lengths beside powers of two up to 8192",
        asks=lambda declaration, dtype: _affordable(forward_problems(declaration, dtype)),
        first_look="file",
        admits=lambda problem, support: True,  # the problems depend on the machine
    ),
    Group(
        name="lengths_gradients",
        about="dV scatters dO, and dQ and dK are 0, at lengths beside powers of two up to 8192",
        entry="backward",
        asks=lambda declaration, dtype: _affordable(backward_problems(declaration, dtype)),
        first_look="file",
        admits=lambda problem, support: True,
    ),
)

ORACLES = (
    replace(
        counting.ORACLE,
        group="lengths",
        catches="blocks of keys that are lost or doubled from some power of two on",
        concerns=lambda trial: trial.problem.distribution == "counting",
        rank=10,
    ),
    replace(
        gather.FORWARD,
        group="lengths",
        catches="indices of rows and keys that wrap at a power of two up to 8192",
        judge=gather_long,
        concerns=lambda trial: trial.problem.distribution == "gather",
        rank=20,
    ),
    replace(
        gather.BACKWARD,
        group="lengths_gradients",
        catches="indices of rows and keys of a backward that wrap at a power of two up to 8192",
        concerns=lambda trial: trial.problem.distribution == "gather_integers",
    ),
)
