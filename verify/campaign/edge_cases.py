"""Edge cases: the problems that every run asks of a target.

They are a greedy cover of the target's coverage bins, selected from many drawn problems, and corner
shapes that have no bin and that random lengths rarely hit.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from hypothesis.errors import Unsatisfiable

from references.masks import Causal, Documents, Full, Lengths, Mask, Prefix, Window, intersect
from references.quantisation import parse_quantisation
from references.score_mods import Softcap
from verify.campaign.targets import Target
from verify.campaign.together import like
from verify.oracles import groups, of_group
from verify.problem import Layout, Problem
from verify.problem.coverage import bins_reachable, coverage_bins, square_only
from verify.problem.lengths import raised
from verify.problem.refusal import fewest_heads, inside, plainest
from verify.problem.sampling import draws
from verify.problem.strategies import Limits
from verify.variant import Config, Declaration, Support

_ROUND = 300  # draws; a millisecond each
_ROUNDS = 5
_FEW = 24  # draws
_SMALL = Limits(seqlen=70, long_seqlen=70, heads=4, batch=2, pairs=5000, elements=40_000)
_DISTRIBUTION = "distribution:"  # begins the names of its bins
_SEVERAL = 5  # rows and keys
_TRIES = 3
_SEVERAL_BLOCKS = 64  # keys
_INT16 = 1 << 15
_MANY_HEADS = 33  # query heads of one key head: more than a tile of 16 or 32 rows
# Sequences and heads: 258 pairs, more than 128 and 256; and 129 for Triton's interpreter, which
# takes milliseconds for each program.
_PAIRS, _INTERPRETED_PAIRS = (43, 6), (43, 3)
# Lengths of documents: several of them in a tile, and empty ones beside each other and at the ends.
_CROWD = (0, 1, 2, 0, 3, 1, 1, 5, 0, 0, 7, 8, 4, 1, 0, 9, 16, 17, 0)
_LONG = 1152  # keys: more than 1024, a multiple of 128; kernels rarely read so many in one step
_BUCKETS = (64, 128, 256)  # head dims, if a kernel does not declare its own
_LARGEST_BLOCK = 1024  # the most threads of a CUDA block; kernels often handle so many in one step
# Pairs (rows, keys): multiples of 8, 16, 32, 64 or 128, but of no larger power of two.
_PARTIAL = ((24, 40), (16, 48), (96, 160), (64, 320), (128, 384))


def edge_cases(target: Target) -> list[Problem]:
    """Problems that fill every bin that the target's support can reach, then the `edges`.

    Small problems are preferred, and the order is stable.  A bin that no draw fills stays empty,
    and the report says so.  Only the config with the smallest key tiles gets all of these; the
    others get `partial_tiles`.
    """
    if not leads(target):
        return partial_tiles(target)
    cases: dict[str, Problem] = {}
    for number in range(_ROUNDS):
        for problem in drawn(target, _ROUND, number):
            cases.setdefault(problem.name, problem)
        selected, missing = _cover(target, list(cases.values()))
        others = _with_distributions(target, list(cases.values()), missing)
        if others:
            cases |= {problem.name: problem for problem in others}
            selected, missing = _cover(target, list(cases.values()))
        if not missing:
            break
    return list({problem.name: problem for problem in (*selected, *edges(target))}.values())


def first_cases(target: Target) -> list[Problem]:
    """A few small problems of several rows and keys, the sharpest first: with an O of 16 or more
    bits, whose bounds are narrower.

    A family draws the group of each case, so that few cases ask some of its groups nothing; these
    do.  None where no draw fits the group.
    """
    try:
        fitting = [p for p in map(target.fitted, _few(target)) if p is not None and p.pairs]
        few = fitting or [p for p in drawn(target, _FEW, 0, _SMALL) if p.pairs]
    except Unsatisfiable:
        return []
    found = {p.name: p for p in few}.values()
    several = [p for p in found if min(p.seqlen_q, p.seqlen_kv) >= _SEVERAL] or list(found)

    def cost(p: Problem) -> tuple[bool, int]:
        return p.scaled_output is not None, p.batch * p.heads_q * p.pairs * p.head_dim

    return sorted(several, key=cost)[:_TRIES]


_drawn: dict[tuple[object, ...], list[Problem]] = {}


def _few(target: Target) -> list[Problem]:
    """A few small problems to fit to the target's group: drawn once for all groups that draw from
    the same distributions and masks, and for all dtypes of a support."""
    group, declaration = groups()[target.group], target.declaration
    dtypes = target.dtype if declaration.support.dtypes_out else ""
    support = repr(vars(declaration.support) | {"dtypes": dtypes})
    key = support, declaration.interpreted, group.distributions, group.masked
    if key not in _drawn:
        _drawn[key] = draws(target.unfitted(_SMALL), _FEW)
    return [problem.but(dtype=target.dtype) for problem in _drawn[key]]


def drawn(target: Target, count: int, number: int, limits: Limits | None = None) -> list[Problem]:
    """The target's `draws`, no larger than the limits; drawn once for all variants and configs of a
    support, and for all its dtypes and all groups, if the draws are the same."""
    group, declaration = groups()[target.group], target.declaration
    strategy = target.problems if limits is None else target.within(limits)
    if group.outside:
        return draws(strategy, count, number)
    own = declaration.support.dtypes_out or group.adapt or group.excludes_problem
    support = repr(vars(declaration.support) | {"dtypes": ()})
    needs = repr([oracle.needs for oracle in of_group(target.group)])
    drawing = declaration.interpreted, group.distributions, group.masked, needs, limits
    key = support, *drawing, (target.dtype, group.name) if own else (), count, number
    if key not in _drawn:
        _drawn[key] = draws(strategy, count, number)
    return [problem.but(dtype=target.dtype) for problem in _drawn[key]]


def leads(target: Target) -> bool:
    """Whether its config is the leading one of its variant."""
    return target.config == leading(target.declaration)


def leading(declaration: Declaration) -> Config:
    """The config with the smallest key tiles, of which short problems have the most."""
    return min(declaration.configs, key=lambda config: config.block_n or 64)


def partial_tiles(target: Target) -> list[Problem]:
    """Supported problems whose last tile is filled to a power of two, with very low scores.

    A kernel can mistake a multiple of a part of its tile for a complete tile, and not mask the keys
    past the end.  A key of zeros has the score 0, and thus the weight e^-LSE, which overflows.
    """
    support, square = target.declaration.support, square_only(target.declaration.support)
    low = _plain(target).but(distribution="negative_lse")
    cases = [low.but(seqlen_q=keys if square else rows, seqlen_kv=keys) for rows, keys in _PARTIAL]
    return [problem for problem in cases if inside(support, problem)]


def edges(target: Target) -> list[Problem]:
    """The supported problems among these corner shapes:

    - keys without queries, whose gradients are 0, and queries without keys;
    - `partial_tiles`;
    - diagonals, windows, documents and prefixes whose corners are at the corners of tiles, or one
      element beside them; windows of which one side is open,
      and an intersection of two windows;
    - Q, K and V in three different layouts; K of one head for all, and V of one sequence for all;
    - many heads, groups and sequences; a third group of heads in a third sequence; one or a few
      rows of grouped heads;
    - many short and empty documents;
    - scales far from 1, and a negative scale under a cap;
    - factors of several blocks of rows and of keys;
    - more than 1024 rows, and for a forward more than 1024 and more than 2^15 keys.  If possible, a
      mask hides most of them, so that Triton's interpreter is fast enough.
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
    # Strides of 0, which a tensor map replaces by index 0 of one head or sequence.
    repeated = plain.but(batch=2, heads_q=2, heads_kv=2, seqlen_q=8, seqlen_kv=8)
    yield repeated.but(layout_k=Layout(expand="h"), layout_v=Layout(expand="b"))
    batch, heads = _INTERPRETED_PAIRS if target.declaration.interpreted else _PAIRS
    yield plain.but(batch=batch, heads_q=heads, heads_kv=heads, seqlen_q=9, seqlen_kv=9)
    yield plain.but(batch=3, heads_q=9, heads_kv=3, seqlen_q=9, seqlen_kv=41)
    for rows in (1, 5):
        yield plain.but(heads_q=_MANY_HEADS, seqlen_q=rows)
    yield from _few_rows(plain.but(heads_q=6, heads_kv=2, seqlen_q=5, seqlen_kv=133), support)
    for scale in (32.0, 2.0**-12):
        yield plain.but(softmax_scale=scale)
    capped = plain.but(softmax_scale=-plain.scale, score_mod=Softcap(1.0))
    yield _masked(capped, support, Causal(), Full())
    yield from _block_factors(plain, support)
    if groups()[target.group].entry == "forward":
        yield plain.but(heads_q=6, heads_kv=2, seqlen_q=1, seqlen_kv=_LONG)
        yield plain.but(
            batch=2,
            heads_q=3,
            seqlen_q=1,
            seqlen_kv=_LONG,
            mask=Lengths((1, 1), (_LONG - 64, 192)),
        )
        yield _masked(low.but(seqlen_q=1, seqlen_kv=_INT16 + 22), support, Window(70, 0), Full())
    tall = plain.but(seqlen_q=_LARGEST_BLOCK + 17, seqlen_kv=17)
    yield _masked(tall, support, Documents((17,)), Lengths((tall.seqlen_q,), (17,)), Causal())


def _plain(target: Target) -> Problem:
    """A problem with one short sequence and one narrow head."""
    support = target.declaration.support
    rows, keys = raised(support, 33, 33)
    return Problem(
        heads_q=fewest_heads(support),
        seqlen_q=rows,
        seqlen_kv=keys,
        head_dim=min(support.head_dims, key=lambda dim: abs(dim - 16)),
        dtype=target.dtype,
        **plainest(support),
    )


def _corners(plain: Problem, tile: int) -> Iterator[Problem]:
    """Masks with corners one element beside the tile's corners, or at those of tiles of 64 and 128;
    and complete tiles only."""
    for difference in (1, -1):
        yield plain.but(seqlen_q=2 * tile, seqlen_kv=2 * tile + difference, mask=Causal())
    # The first row of a tile of any size does not see the last key of a tile, and no other pair of
    # the two is hidden.
    yield plain.but(seqlen_q=tile, seqlen_kv=2 * tile - 2, mask=Causal())
    # Windows whose edges cross tiles on both sides: between the edges one tile of keys, or of rows,
    # is completely visible.
    yield plain.but(seqlen_q=17, seqlen_kv=4 * tile + 5, mask=Window(2 * tile + 19, 0))
    yield plain.but(seqlen_q=4 * tile + 5, seqlen_kv=17, mask=Window(2 * tile + 19, 0, "tl"))
    yield plain.but(seqlen_q=64, seqlen_kv=192, mask=Causal())
    yield plain.but(seqlen_q=192, seqlen_kv=64, mask=Causal())
    for side in (64, 63):  # the first and the last row of 64 end at a corner
        yield plain.but(seqlen_q=192, seqlen_kv=384, mask=Window(side, side))
    # The last row of a tile of any size is the first that does not see a tile of keys whole.
    yield plain.but(seqlen_q=136, seqlen_kv=264, mask=Window(126, 200))
    for window in (Window(20, None), Window(None, 20)):  # one side is open
        yield plain.but(seqlen_q=40, seqlen_kv=100, mask=window)
    # each window hides keys that the other shows, on both sides
    both = intersect(Window(20, 3), Window(5, 9))
    yield plain.but(seqlen_q=33, seqlen_kv=65, mask=both)
    yield plain.but(seqlen_q=192, seqlen_kv=320, mask=Documents((128, 128, 64)))
    yield plain.but(seqlen_q=sum(_CROWD), seqlen_kv=sum(_CROWD), mask=Documents(_CROWD))
    yield plain.but(seqlen_q=128, seqlen_kv=320, mask=Prefix(256))
    yield plain.but(seqlen_q=128, seqlen_kv=384)


def _past_the_end(low: Problem, target: Target) -> Iterator[Problem]:
    """Under very low scores: partial tiles with masks that do not hide the keys past the end, and
    with other head dims; and a row whose first keys lie behind hidden tiles."""
    yield low.but(seqlen_q=192, seqlen_kv=64, mask=Causal("tl"))
    yield low.but(seqlen_q=64, seqlen_kv=192, mask=Window(100, 70))
    yield low.but(batch=2, seqlen_q=64, seqlen_kv=192, mask=Lengths((64, 32), (64, 160)))
    # Whole tiles of keys come before the first that the row sees, also of 128 keys.
    for window in (Window(2, 1), Window(5, None)):
        yield low.but(seqlen_q=1, seqlen_kv=300, mask=window)
    for dim in target.declaration.head_dim_buckets or _BUCKETS:
        for rows, keys in ((32, 64), (64, 32)) if dim != low.head_dim else ():
            yield low.but(
                head_dim=dim, head_dim_v=dim, softmax_scale=None, seqlen_q=rows, seqlen_kv=keys
            )


def _few_rows(few: Problem, support: Support) -> Iterator[Problem]:
    """Problems with few rows, in which kernels pack rows of several heads into one tile: the mask
    must use the row within the head."""
    # In the second shape the first rows see no key.
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


def _block_factors(plain: Problem, support: Support) -> Iterator[Problem]:
    """Three blocks of rows and five of keys with factors of their own: random lengths rarely reach
    a third."""
    for word in support.descalings:
        kind = parse_quantisation(word)
        if kind.keys:
            rows, keys = 2 * kind.keys + 5, 4 * kind.keys + 9
            yield plain.but(seqlen_q=rows, seqlen_kv=keys, quantisation=kind)


def _masked(problem: Problem, support: Support, *masks: Mask) -> Problem:
    """The problem with the first supported mask of `masks`, or with the last one."""
    cases = [problem.but(mask=mask) for mask in masks]
    return next((case for case in cases if support.refusal(case) is None), cases[-1])


def _spans_blocks(problem: Problem) -> bool:
    """Whether rows weigh several blocks of keys: most wrong kernels are right for one key."""
    return problem.seqlen_kv > _SEVERAL_BLOCKS and problem.seqlen_q > 1


def _with_distributions(
    target: Target, problems: list[Problem], missing: set[str]
) -> list[Problem]:
    """Some of the problems with the distributions that are missing, which need no further draws."""
    names = [each.removeprefix(_DISTRIBUTION) for each in missing if each.startswith(_DISTRIBUTION)]
    found: list[Problem] = []
    for name in sorted(names):
        fitting = (other for each in problems for other in like(target, each, (name, each.seed)))
        found += islice(fitting, _FEW)
    return found


def _cover(target: Target, problems: list[Problem]) -> tuple[list[Problem], set[str]]:
    """A greedy cover of the target's bins; returns the selected problems and the bins left empty.

    Each step takes the problem that fills the most missing bins; among equals first one that
    `_spans_blocks`, then the cheapest.
    """
    missing = bins_reachable(target.declaration.support, target.config)
    bins = [coverage_bins(problem, target.config) for problem in problems]
    selected: list[Problem] = []
    while missing:
        gain = [
            (len(bins[i] & missing), _spans_blocks(problem), -problem.pairs)
            for i, problem in enumerate(problems)
        ]
        best = max(range(len(problems)), key=gain.__getitem__, default=None)
        if best is None or not bins[best] & missing:
            break
        selected.append(problems[best])
        missing = missing - bins[best]
    return selected, missing
