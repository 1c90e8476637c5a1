"""Edge cases: the few problems that fill every coverage bin of a target, chosen among many that are
drawn and not judged, and those at edges that no bin names and that random lengths hardly ever meet.
"""

from __future__ import annotations

from collections.abc import Iterator

from references.masks import Causal, Documents, Full, Lengths, Mask, Prefix, Window, intersect
from verify.campaign.targets import Target
from verify.oracles import groups
from verify.problem import Layout, Problem
from verify.problem.coverage import bins_reachable, coverage_bins, square_only
from verify.problem.refusal import inside, plainest
from verify.problem.sampling import draws
from verify.variant import Config, Declaration, Support

_ROUND = 300  # draws; a millisecond each
_ROUNDS = 5
_TELLING = 64  # keys
_INT16 = 1 << 15
_WIDE = 33  # query heads of one key head: more than a tile of 16 or 32 rows
_MANY = (43, 6)  # sequences and heads, 258 pairs: past 128 and 256
# keys: past 1024, a multiple of 128, and more than one row is likely to read in one go
_SPLIT = 1152
# head dims, where a kernel does not say which ones it has tiles of their own for
_BUCKETS = (64, 128, 256)
_SCANNED = 1024  # the most threads of a block, and so what is often looked at in one go
# Rows and keys that divide by 8, 16, 32, 64 or 128 and no further.
_IN_PART = ((24, 40), (16, 48), (96, 160), (64, 320), (128, 384))


def edge_cases(target: Target) -> list[Problem]:
    """Problems that together fill every bin that the target's support can reach, small ones
    preferred, in a stable order.

    A bin that none of the draws fills stays empty, and the report says so.  Then come the `edges`.
    Of a config with larger tiles than another one has, only `partial_tiles` are asked.
    """
    if target.config != _finest(target.declaration):
        return partial_tiles(target)
    found: dict[str, Problem] = {}
    for number in range(_ROUNDS):
        for problem in drawn(target, _ROUND, number):
            found.setdefault(problem.name, problem)
        chosen, missing = _cover(target, list(found.values()))
        if not missing:
            break
    return list({problem.name: problem for problem in (*chosen, *edges(target))}.values())


_drawn: dict[tuple[object, ...], list[Problem]] = {}


def drawn(target: Target, count: int, number: int) -> list[Problem]:
    """The target's `draws`: made once for all dtypes of a support, where each is drawn alike."""
    group, declaration = groups()[target.group], target.declaration
    if declaration.support.dtypes_out or group.adapt or group.excludes_problem or group.outside:
        return draws(target.problems, count, number)
    asked = repr(vars(declaration.support) | {"dtypes": ()})
    key = asked, declaration.interpreted, group.distributions, group.masked, count, number
    if key not in _drawn:
        _drawn[key] = draws(target.problems, count, number)
    return [problem.but(dtype=target.dtype) for problem in _drawn[key]]


def _finest(declaration: Declaration) -> Config:
    """The config with the smallest key tiles, which short problems exercise most."""
    return min(declaration.configs, key=lambda config: config.block_n or 64)


def partial_tiles(target: Target) -> list[Problem]:
    """Last tiles that are filled to a power of two, with scores so low that one key too many shows;
    those that the support has.

    A kernel may take multiples of a part of its tile for whole tiles, and leave what is past the
    end unmasked: a key of zeros has the score 0, and so the weight e^-LSE, which overflows.
    """
    support, square = target.declaration.support, square_only(target.declaration.support)
    low = _plain(target).but(distribution="negative_lse")
    found = [low.but(seqlen_q=keys if square else rows, seqlen_kv=keys) for rows, keys in _IN_PART]
    return [problem for problem in found if inside(support, problem)]


def edges(target: Target) -> list[Problem]:
    """Those that the support has of: keys without queries, whose gradients are 0, and queries
    without keys; `partial_tiles`; diagonals, windows, documents and prefixes whose corners are
    those of tiles, or pass one beside them; Q, K and V each in an order of its own; many heads,
    groups and sequences; one or a few rows of grouped heads; scales far from 1, or negative under a
    cap; rows past 1024; and for a forward keys past 1024 and 2^15.  Where a mask can hide what is
    before these rows and keys it does, so that the interpreter bears them.
    """
    support = target.declaration.support
    return [problem for problem in _edges(target) if inside(support, problem)]


def _edges(target: Target) -> Iterator[Problem]:
    support = target.declaration.support
    plain = _plain(target)
    low = plain.but(distribution="negative_lse")
    yield plain.but(seqlen_q=0)
    yield plain.but(seqlen_kv=0)
    yield from partial_tiles(target)
    if target.dtype != support.dtypes[0]:
        return
    yield from _corners(plain, max(target.config.block_m or 64, target.config.block_n or 64))
    yield from _past_the_end(low, target)
    yield plain.but(
        batch=2, heads_q=3, heads_kv=3, layout_q=Layout("bshd"), layout_k=Layout("sbhd")
    )
    yield plain.but(batch=_MANY[0], heads_q=_MANY[1], heads_kv=_MANY[1], seqlen_q=9, seqlen_kv=9)
    for rows in (1, 5):
        yield plain.but(heads_q=_WIDE, seqlen_q=rows)
    yield from _few_rows(plain.but(heads_q=6, heads_kv=2, seqlen_q=5, seqlen_kv=133), support)
    for scale in (32.0, 2.0**-12):
        yield plain.but(softmax_scale=scale)
    yield _masked(plain.but(softmax_scale=-plain.scale, softcap=1.0), support, Causal(), Full())
    if groups()[target.group].entry == "forward":
        yield plain.but(heads_q=6, heads_kv=2, seqlen_q=1, seqlen_kv=_SPLIT)
        yield plain.but(
            batch=2,
            heads_q=3,
            seqlen_q=1,
            seqlen_kv=_SPLIT,
            mask=Lengths((1, 1), (_SPLIT - 64, 192)),
        )
        yield _masked(low.but(seqlen_q=1, seqlen_kv=_INT16 + 22), support, Window(70, 0), Full())
    tall = plain.but(seqlen_q=_SCANNED + 17, seqlen_kv=17)
    yield _masked(tall, support, Documents((17,)), Lengths((tall.seqlen_q,), (17,)), Causal())


def _plain(target: Target) -> Problem:
    """One short sequence of one narrow head."""
    support = target.declaration.support
    return Problem(
        seqlen_q=33,
        seqlen_kv=33,
        head_dim=min(support.head_dims, key=lambda dim: abs(dim - 16)),
        dtype=target.dtype,
        **plainest(support),
    )


def _corners(plain: Problem, tile: int) -> Iterator[Problem]:
    """Masks whose corners lie one beside those of that tile, or at those of 64 and 128; and nothing
    but whole tiles."""
    for beside in (1, -1):
        yield plain.but(seqlen_q=2 * tile, seqlen_kv=2 * tile + beside, mask=Causal())
    # Windows past the corners of tiles on both sides: between their edges lies a tile of keys, or
    # of rows, that is seen whole.
    yield plain.but(seqlen_q=17, seqlen_kv=4 * tile + 5, mask=Window(2 * tile + 19, 0))
    yield plain.but(seqlen_q=4 * tile + 5, seqlen_kv=17, mask=Window(2 * tile + 19, 0, "tl"))
    yield plain.but(seqlen_q=64, seqlen_kv=192, mask=Causal())
    yield plain.but(seqlen_q=192, seqlen_kv=64, mask=Causal())
    for side in (64, 63):  # the first and the last row of 64 end at a corner
        yield plain.but(seqlen_q=192, seqlen_kv=384, mask=Window(side, side))
    yield plain.but(seqlen_q=192, seqlen_kv=320, mask=Documents((128, 128, 64)))
    yield plain.but(seqlen_q=128, seqlen_kv=320, mask=Prefix(256))
    yield plain.but(seqlen_q=128, seqlen_kv=384)


def _past_the_end(low: Problem, target: Target) -> Iterator[Problem]:
    """Tiles filled in part again: with masks that do not hide what is past the last key, and at
    other head dims."""
    yield low.but(seqlen_q=192, seqlen_kv=64, mask=Causal("tl"))
    yield low.but(seqlen_q=64, seqlen_kv=192, mask=Window(100, 70))
    yield low.but(batch=2, seqlen_q=64, seqlen_kv=192, mask=Lengths((64, 32), (64, 160)))
    for dim in target.declaration.head_dim_buckets or _BUCKETS:
        for rows, keys in ((32, 64), (64, 32)) if dim != low.head_dim else ():
            yield low.but(
                head_dim=dim, head_dim_v=dim, softmax_scale=None, seqlen_q=rows, seqlen_kv=keys
            )


def _few_rows(few: Problem, support: Support) -> Iterator[Problem]:
    """Rows of several heads that kernels pack into one tile, where the mask goes by the row of a
    head."""
    # the last with rows before the first key
    for rows, keys in ((few.seqlen_q, few.seqlen_kv), (40, 17)):
        yield few.but(seqlen_q=rows, seqlen_kv=keys, mask=Causal())
    for rows in (1, few.seqlen_q):
        yield few.but(seqlen_q=rows, mask=Window(63, 0))
    lengths = Lengths((5, 3), (128, 70))
    yield _masked(few.but(batch=2), support, intersect(Causal(), lengths), lengths)
    yield few.but(batch=2, heads_q=3, heads_kv=1, mask=intersect(Window(63, 0), lengths))
    other = min(
        (dim for dim in support.head_dims if dim != few.head_dim),
        key=lambda dim: abs(dim - 40),
        default=few.head_dim,
    )
    for dim, dim_v in (
        ((few.head_dim, other), (other, few.head_dim)) if other != few.head_dim else ()
    ):
        yield few.but(head_dim=dim, head_dim_v=dim_v, softmax_scale=None, mask=Causal())


def _masked(problem: Problem, support: Support, *masks: Mask) -> Problem:
    """With the first of these masks that is supported, or with the last one."""
    found = [problem.but(mask=mask) for mask in masks]
    return next((candidate for candidate in found if support.refusal(candidate) is None), found[-1])


def _telling(problem: Problem) -> bool:
    """Whether rows weigh several blocks' worth of keys against each other: one key alone is right
    in most wrong kernels."""
    return problem.seqlen_kv > _TELLING and problem.seqlen_q > 1


def _cover(target: Target, problems: list[Problem]) -> tuple[list[Problem], set[str]]:
    """A greedy cover: the problem that fills most of what is missing; if two are equal the telling
    one, then the cheaper."""
    missing = bins_reachable(target.declaration.support, target.config)
    bins = [coverage_bins(problem, target.config) for problem in problems]
    chosen: list[Problem] = []
    while missing:
        gain = [
            (len(bins[i] & missing), _telling(problem), -problem.pairs)
            for i, problem in enumerate(problems)
        ]
        best = max(range(len(problems)), key=gain.__getitem__, default=None)
        if best is None or not bins[best] & missing:
            break
        chosen.append(problems[best])
        missing = missing - bins[best]
    return chosen, missing
