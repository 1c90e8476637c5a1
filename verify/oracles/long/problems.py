"""Long problems for every kernel: sequences past 131072, and more sequences than a CUDA grid is
wide.

The problems depend on the speed of the device: a GPU gets whole squares, a CPU few rows with many
keys and many rows with few keys, Triton's interpreter sequences just past 32768.
docs/long-sequences.md says what this leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator

from references.masks import Causal, Full, Lengths, Mask
from verify.cell.discovery import environment
from verify.problem import Problem
from verify.problem.known_answers import GATHERS, gather_possible
from verify.problem.refusal import fewest_heads, nearest_head_dim, plainest
from verify.variant import Declaration, Support

# rows or keys: past the powers of two at which indices wrap, with a ragged tail
LONG = (1 << 17) + 65
_FEW = 130  # of the other side
_PAST_INT16 = (1 << 15) + 65
_CROWD = (1 << 16) + 1  # sequences: a grid's second and third dimension hold 65535
_SEED = 20


def forward_problems(declaration: Declaration, dtype: str) -> list[Problem]:
    """Return the problems of group "long" for a variant and dtype."""
    return possible(declaration.support, _forward(declaration, dtype))


def backward_problems(declaration: Declaration, dtype: str) -> list[Problem]:
    """Return the problems of group "long_gradients" for a variant and dtype."""
    return possible(declaration.support, _backward(declaration, dtype))


def _forward(d: Declaration, dtype: str) -> Iterator[Problem]:
    support, leads = d.support, dtype == d.support.dtypes[0]
    if d.interpreted:
        if leads:
            yield nearest(support, dtype, 3, _PAST_INT16, distribution="gather", head_dim=16)
            yield nearest(
                support, dtype, 3, 1089, Causal(), distribution="negative_lse", head_dim=16, group=2
            )
    elif environment().device == "cpu":
        yield nearest(support, dtype, 24, LONG, distribution="gather", group=2)
        if leads:
            yield nearest(support, dtype, 8, LONG, distribution="negative_lse", group=2)
            yield nearest(support, dtype, LONG, 17, distribution="gather", head_dim=16)
    else:
        yield nearest(
            support,
            dtype,
            LONG if _squares(d) else _FEW,
            LONG,
            Causal(),
            distribution="gather",
            heads_kv=2,
            group=2,
        )
        yield nearest(
            support,
            dtype,
            _FEW,
            LONG,
            Causal(),
            distribution="increasing",
            head_dim=128,
            heads_kv=2,
        )
        ragged = Lengths((_FEW, _FEW), (LONG, LONG // 2))
        yield nearest(
            support, dtype, _FEW, LONG, ragged, distribution="negative_lse", batch=2, group=2
        )
        yield nearest(support, dtype, LONG, _FEW, distribution="gather", heads_kv=2, group=2)
        if _squares(d):
            yield nearest(support, dtype, LONG, LONG, distribution="normal", group=2)
            yield nearest(support, dtype, 2, 5, distribution="normal", head_dim=16, batch=_CROWD)


def _backward(d: Declaration, dtype: str) -> Iterator[Problem]:
    support, leads = d.support, dtype == d.support.dtypes[0]
    if d.interpreted:
        if leads:
            yield nearest(support, dtype, 2, 2113, distribution="gather_integers", head_dim=16)
            yield nearest(support, dtype, 577, 33, distribution="gather_integers", head_dim=16)
            yield nearest(
                support, dtype, 130, 150, Causal(), distribution="normal", head_dim=16, group=2
            )
    elif environment().device == "cpu":
        yield nearest(support, dtype, 24, LONG, distribution="gather_integers", group=2)
        yield nearest(support, dtype, 5, LONG, distribution="normal", group=2)
        yield nearest(support, dtype, LONG, 17, distribution="gather_integers", head_dim=16)
        yield nearest(support, dtype, LONG, 17, distribution="normal", head_dim=16)
    else:
        rows = LONG if _squares(d) else _FEW
        yield nearest(
            support,
            dtype,
            rows,
            LONG,
            Causal(),
            distribution="gather_integers",
            heads_kv=2,
            group=2,
        )
        yield nearest(support, dtype, rows, LONG, Causal(), distribution="normal", group=2)
        yield nearest(support, dtype, _FEW, LONG, distribution="normal", head_dim=128, heads_kv=2)
        yield nearest(
            support, dtype, LONG, _FEW, distribution="gather_integers", heads_kv=2, group=2
        )
        yield nearest(support, dtype, LONG, _FEW, distribution="normal", heads_kv=2, group=2)
        if _squares(d):
            yield nearest(support, dtype, 2, 5, distribution="normal", head_dim=16, batch=_CROWD)


def _squares(d: Declaration) -> bool:
    """Return whether no memory grows with rows times keys, and no grid with the batch.

    A kernel that allocates its own tensors, such as a library's, can write a mask or all scores to
    memory; one that takes all keys at once (block_n = 0) does.  No support states the limits of a
    library's grids.
    """
    return not d.allocates_outputs and not d.undeclared and d.numerics.softmax.block_n != 0


def nearest(
    support: Support,
    dtype: str,
    seqlen_q: int,
    seqlen_kv: int,
    mask: Mask | None = None,
    **more: int | str,
) -> Problem:
    """Return the nearest problem that the support allows: `head_dim` (default 64), the mask (else
    full), `group` query heads per key head."""
    wanted = int(more.pop("head_dim", 64))
    heads_kv, group = int(more.pop("heads_kv", 1)), int(more.pop("group", 1))
    if not support.grouped_heads:
        heads_kv, group = heads_kv * group, 1
    group = max(group, fewest_heads(support))
    plain = Problem(
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        head_dim=nearest_head_dim(support.head_dims, wanted, larger=True),
        dtype=dtype,
        seed=_SEED,
        **plainest(support),
        **more,  # type: ignore[arg-type]
    )
    masked = plain if mask is None else plain.but(mask=mask)
    return plain.but(mask=Full()) if support.refusal(masked) is not None else masked


def possible(support: Support, problems: Iterator[Problem]) -> list[Problem]:
    """Return the problems inside the support whose values can be built."""
    inside = [problem for problem in problems if support.refusal(problem) is None]
    return [p for p in inside if p.distribution not in GATHERS or gather_possible(p) is None]
