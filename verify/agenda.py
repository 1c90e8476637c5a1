"""Agenda: the few problems that fill every coverage bin of a docket, chosen among many that are drawn and not judged, and
those at edges that no bin names and that random lengths hardly ever meet."""

from __future__ import annotations

from collections.abc import Iterator

from references.masks import Causal, Documents, Full, Lengths, Mask, Window
from verify.court import Docket
from verify.coverage import bins_reachable, coverage_bins
from verify.draws import draws
from verify.oracles import groups
from verify.problem import Layout, Problem
from verify.relations import inside
from verify.variant import Support

_ROUND = 300  # draws; a millisecond each
_ROUNDS = 5
_TELLING = 64  # keys
_INT16 = 1 << 15
_WIDE = 33  # query heads of one key head: more than a tile of 16 or 32 rows
_MANY = (43, 6)  # sequences and heads, 258 pairs: past 128 and 256
_SCANNED = 1024  # the most threads of a block, and so what is often looked at in one go


def agenda(docket: Docket) -> list[Problem]:
    """Problems that together fill every bin that the docket's support can reach, small ones preferred, in a stable order.

    A bin that none of the draws fills stays empty, and the report says so.  Then come the `edges`.
    """
    drawn: dict[str, Problem] = {}
    for number in range(_ROUNDS):
        for problem in draws(docket.problems, _ROUND, number):
            drawn.setdefault(problem.name, problem)
        chosen, missing = _cover(docket, list(drawn.values()))
        if not missing:
            break
    return list({problem.name: problem for problem in (*chosen, *edges(docket))}.values())


def edges(docket: Docket) -> list[Problem]:
    """Those that the support has of: keys without queries, whose gradients are 0, and queries without keys; diagonals that pass
    one beside the corners of tiles, windows that are wider than two; Q, K and V each in an order of its own; many heads,
    groups and sequences; scales far from 1; rows past 1024; and for a forward keys past 2^15, with scores so low that one too
    many shows.  Where a mask can hide what is before these rows and keys it does, so that the interpreter bears them.
    """
    support = docket.declaration.support
    return [problem for problem in _edges(docket) if inside(support, problem)]


def _edges(docket: Docket) -> Iterator[Problem]:
    support = docket.declaration.support
    plain = Problem(
        seqlen_q=33,
        seqlen_kv=33,
        head_dim=min(support.head_dims, key=lambda dim: abs(dim - 16)),
        dtype=docket.dtype,
        descaling="none" if "none" in support.descalings else support.descalings[0],
    )
    yield plain.but(seqlen_q=0)
    yield plain.but(seqlen_kv=0)
    if docket.dtype != support.dtypes[0]:
        return
    tile = max(docket.config.block_m or 64, docket.config.block_n or 64)
    for beside in (1, -1):
        yield plain.but(seqlen_q=2 * tile, seqlen_kv=2 * tile + beside, mask=Causal())
    # Windows past the corners of tiles on both sides: between their edges lies a tile of keys, or of rows, that is seen whole.
    yield plain.but(seqlen_q=17, seqlen_kv=4 * tile + 5, mask=Window(2 * tile + 19, 0))
    yield plain.but(seqlen_q=4 * tile + 5, seqlen_kv=17, mask=Window(2 * tile + 19, 0, "tl"))
    yield plain.but(batch=2, heads_q=3, heads_kv=3, layout_q=Layout("bshd"), layout_k=Layout("sbhd"))
    yield plain.but(batch=_MANY[0], heads_q=_MANY[1], heads_kv=_MANY[1], seqlen_q=9, seqlen_kv=9)
    for rows in (1, 5):
        yield plain.but(heads_q=_WIDE, seqlen_q=rows)
    for scale in (32.0, 2.0**-12):
        yield plain.but(softmax_scale=scale)
    if groups()[docket.group].entry == "forward":
        wide = plain.but(seqlen_q=1, seqlen_kv=_INT16 + 22, distribution="negative_lse")
        yield _masked(wide, support, Window(70, 0), Full())
    tall = plain.but(seqlen_q=_SCANNED + 17, seqlen_kv=17)
    yield _masked(tall, support, Documents((17,)), Lengths((tall.seqlen_q,), (17,)), Causal())


def _masked(problem: Problem, support: Support, *masks: Mask) -> Problem:
    """With the first of these masks that is supported, or with the last one."""
    found = [problem.but(mask=mask) for mask in masks]
    return next((candidate for candidate in found if support.refusal(candidate) is None), found[-1])


def _telling(problem: Problem) -> bool:
    """Whether rows weigh several blocks' worth of keys against each other: one key alone is right in most wrong kernels."""
    return problem.seqlen_kv > _TELLING and problem.seqlen_q > 1


def _cover(docket: Docket, problems: list[Problem]) -> tuple[list[Problem], set[str]]:
    """A greedy cover: the problem that fills most of what is missing; if two are equal the telling one, then the cheaper."""
    missing = bins_reachable(docket.declaration.support, docket.config)
    bins = [coverage_bins(problem, docket.config) for problem in problems]
    chosen: list[Problem] = []
    while missing:
        gain = [(len(bins[i] & missing), _telling(problem), -problem.pairs) for i, problem in enumerate(problems)]
        best = max(range(len(problems)), key=gain.__getitem__, default=None)
        if best is None or not bins[best] & missing:
            break
        chosen.append(problems[best])
        missing = missing - bins[best]
    return chosen, missing
