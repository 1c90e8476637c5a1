"""A backward of which nothing is known but that it differentiates attention: the least accurate
honest arithmetic, and a D and an LSE of any origin.

The derivation is docs/tolerance-backward.md, *An unknown backward*.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verify.arithmetic.dtypes import dtype_named
from verify.problem import Problem
from verify.tolerance.arithmetic import U, relative
from verify.tolerance.gradients_arithmetic import GradientArithmetic
from verify.tolerance.gradients_pairs import Own, Rows
from verify.tolerance.gradients_softmax import Tiles, delta_of_weights


@dataclass(frozen=True)
class OwnForward:
    """How far the O and LSE may be off that such a backward has made by a forward of its own, fp64:
    out (batch, heads_q, seqlen_q, head_dim_v), lse (batch, heads_q, seqlen_q)."""

    out: Tensor
    lse: Tensor

    def flat(self) -> OwnForward:
        """The same with one dimension for batch and heads, and a last one of 1 in lse."""
        return OwnForward(self.out.flatten(0, 1), self.lse.unsqueeze(-1).flatten(0, 1))

    def at(self, index: tuple[slice, ...]) -> OwnForward:
        """Some rows of it."""
        return OwnForward(self.out[index].double(), self.lse[index].double())


def anyhow(a: GradientArithmetic) -> GradientArithmetic:
    """The same arithmetic, where everything between the products may be rounded to the inputs'
    dtype, too."""
    return replace(a, narrow=None if a.output.precision >= 24 else dtype_named(a.output.name))


def any_delta(
    problem: Problem,
    tiles: Callable[[], Tiles],
    rows: Rows,
    a: GradientArithmetic,
    own: Own,
    forward: OwnForward,
) -> Own:
    """The row's errors, whether D is the sum of P dP, of a P that was divided by its sum (`own`) or
    that is exp(S - LSE), or the sum of dO O.

    tiles: all pairs of these rows.  forward: of these rows, (heads, rows, head_dim_v) and (heads,
    rows, 1).
    """
    exponent = torch.maximum(own.exponent, forward.lse)
    size = rows.delta.abs()
    off = torch.expm1(forward.lse)
    of_weights = delta_of_weights(problem, tiles(), rows, a).delta
    of_weights = of_weights * (1 + off) + off * size
    terms = relative(problem.head_dim_v + 1, U) + a.narrowing(2)
    by_output = (rows.dout.abs() * forward.out).sum(-1, keepdim=True)
    of_output = by_output * (1 + terms) + terms * rows.delta_size
    delta = torch.maximum(torch.maximum(own.delta, of_weights), of_output)
    return Own(
        exponent.masked_fill(rows.empty, 0.0),
        delta.masked_fill(rows.empty, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf),
    )
