"""Problems just outside a support, each with the argument that the kernel must name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from references.masks import Window, drawn_words, intersect
from references.quantisation import quantisation_words
from references.score_mods import ScoreMod, mod_kind_of, mod_words
from verify.problem import Layout, Problem
from verify.problem.coverage import mask_kinds, square_only
from verify.problem.distributions import ordinary
from verify.problem.lengths import raised
from verify.problem.storage import STRIDED, Storage, storage_kind, storage_words
from verify.problem.strategies import (
    HEAD_DIMS,
    LengthPair,
    Limits,
    draw_atom,
    draw_problems,
    head_dims_in,
)
from verify.variant import Declaration, Support
from verify.variant.support import fits, up

_ILLEGAL_FACTORS = {"default": (2.0, -1.0, 0.0), "positive": (-1.0, 0.0), "nonzero": (0.0,)}
_WINDOWS = (Window(3, 2), Window(2, None), Window(4, 4))  # each kind lacks two of them
_LONGEST_REFUSAL = 1 << 13  # a longer input, made just to see it refused, costs too much memory


def outside(
    declaration: Declaration, *, dtype: str, limits: Limits
) -> st.SearchStrategy[tuple[Problem, str]]:
    """Problems just outside the support, each with the argument that the kernel must name when it
    refuses.

    One thing is broken at a time; what follows from it (head_dim_v where it must equal head_dim)
    goes along.  Empty (`st.nothing()`) if the support has no edge that a Problem can cross.
    """
    edges = tuple(_edges(declaration.support, dtype)) if dtype in declaration.support.dtypes else ()
    return _outside(declaration.support, edges, limits) if edges else st.nothing()


_Change = Callable[[st.DrawFn, Problem], Problem]


@dataclass(frozen=True)
class _Edge:
    """A way out of a support: draw a problem inside another `support`, of those lengths, then
    change it."""

    argument: str
    support: Support
    dtype: str
    lengths: LengthPair | None = None
    change: _Change = lambda draw, problem: problem


@st.composite
def _outside(
    draw: st.DrawFn, support: Support, edges: tuple[_Edge, ...], limits: Limits
) -> tuple[Problem, str]:
    edge = draw(st.sampled_from(edges))
    problem = edge.change(
        draw, draw(draw_problems(edge.support, edge.dtype, limits, ordinary(), edge.lengths))
    )
    refusal = support.refusal(problem)
    named = refusal[0] if refusal else None
    strides = named is None and edge.argument.startswith("layout_")  # which `refusal` does not see
    assert strides or named == edge.argument, (
        f"{named} is refused, not {edge.argument}: {problem.name}"
    )
    return problem, edge.argument


def _edges(support: Support, dtype: str) -> Iterator[_Edge]:
    inner = support.head_dims
    descalings = tuple(word for word in quantisation_words() if word not in support.descalings)
    if descalings:
        yield _Edge("descales", replace(support, descalings=descalings), dtype)
    for other in ("float64", "float32", "bfloat16", "float16"):
        if other not in support.dtypes:
            yield _Edge("dtype", replace(support, dtypes=(other,)), other)
    beyond = [
        d
        for d in (max(inner) + 1, max(inner) + 8, min(inner) - 1, 24, 48)
        if d > 0 and d not in inner
    ]
    if support.separate_head_dim_v:
        apart = replace(support, head_dims=beyond, separate_head_dim_v=False)
        yield _Edge(
            "head_dim",
            apart,
            dtype,
            change=lambda draw, base: base.but(head_dim_v=draw(head_dims_in(support))),
        )
        yield _Edge(
            "head_dim_v",
            support,
            dtype,
            change=lambda draw, base: base.but(head_dim_v=draw(st.sampled_from(beyond))),
        )
    else:
        yield _Edge("head_dim", replace(support, head_dims=beyond), dtype)
        yield _Edge(
            "head_dim_v",
            support,
            dtype,
            change=lambda draw, base: base.but(head_dim_v=_another(draw, support, base)),
        )
    if not support.grouped_heads:
        yield _Edge(
            "heads_kv",
            support,
            dtype,
            change=lambda draw, base: base.but(
                heads_q=base.heads_kv * draw(st.sampled_from((2, 3, 8)))
            ),
        )
    if support.grouped_heads == "only":
        yield _Edge(
            "heads_kv", support, dtype, change=lambda draw, base: base.but(heads_q=base.heads_kv)
        )
    if support.scales != "any":
        factors = st.sampled_from(_ILLEGAL_FACTORS[support.scales])
        yield _Edge(
            "softmax_scale",
            support,
            dtype,
            change=lambda draw, base: base.but(softmax_scale=base.scale * draw(factors)),
        )
    yield from _word_edges(support, dtype)
    yield from _length_edges(support, dtype)
    yield from _mask_edges(support, dtype)
    rows, _ = raised(support, 2, 2)  # a pitch shows from the second row on
    if support.layouts != "any" and (support.max_seqlen or rows) >= rows:
        some = st.just((rows, raised(support, rows, rows)[1]))
        pitches = st.sampled_from((8, 1)) if support.layouts == "contiguous" else st.just(1)
        pitched = pitches.map(lambda pitch: Layout(pitch=pitch))
        never = _never_strided(support)
        for name in [each for each in ("q", "k", "v", "out") if each not in never]:
            yield _Edge(f"layout_{name}", support, dtype, some, _stored(name, pitched))
        for kind in map(storage_kind, support.storages if support.layouts == "aligned" else ()):
            if (misaligned := kind().misaligned) is not None:
                only, name = replace(support, storages=(kind.word,)), kind.holds[0]
                change = _stored(name, st.just(misaligned))
                yield _Edge(f"layout_{name}", only, dtype, some, change)


def _never_strided(support: Support) -> set[str]:
    """The tensors that have to lie in another storage: a strided one of them is refused as K."""
    if STRIDED in support.storages:
        return set()
    return {name for word in support.storages for name in storage_kind(word).holds}


def _stored(name: str, storages: st.SearchStrategy[Storage]) -> _Change:
    return lambda draw, base: base.but(**{f"layout_{name}": draw(storages)})


def _modified(mods: tuple[ScoreMod, ...]) -> _Change:
    return lambda draw, base: base.but(score_mod=draw(st.sampled_from(mods)))


def _another(draw: st.DrawFn, support: Support, base: Problem) -> int:
    """A head_dim_v that differs from head_dim, supported if there is one."""
    others = [d for d in HEAD_DIMS if d in support.head_dims and d != base.head_dim]
    return draw(st.sampled_from(others or [base.head_dim + 8]))


def _word_edges(support: Support, dtype: str) -> Iterator[_Edge]:
    """Score mods and storages that the support lacks."""
    for word in mod_words():
        if word not in support.score_mods:
            yield _Edge(word, support, dtype, change=_modified(mod_kind_of(word).gallery()))
    for word in storage_words():
        if word not in support.storages:
            name = "k" if word == STRIDED else storage_kind(word).holds[0]
            yield _Edge(f"layout_{name}", replace(support, storages=(word,)), dtype)


def _length_edges(support: Support, dtype: str) -> Iterator[_Edge]:
    some, low, step = _supported(support)
    short = support.min_seqlen - 1
    free = replace(support, min_seqlen=0, max_seqlen=None, cross_lengths=True)
    free = replace(free, longer_q=True, seqlen_q_multiple=1, seqlen_kv_multiple=1)
    cross = not square_only(support)
    rows, keys = support.seqlen_q_multiple, support.seqlen_kv_multiple
    if rows > 1:
        yield _Edge(
            "seqlen_q", free, dtype, some.map(lambda n: (n + 1, n + (step if cross else 1)))
        )
    if keys > 1 and (cross or rows == 1):
        yield _Edge("seqlen_kv", free, dtype, some.map(lambda n: (n if cross else n + 1, n + 1)))
    if cross and not support.longer_q:
        yield _Edge("seqlen_q", free, dtype, some.map(lambda n: (n + step, n)))
    if short >= 0:
        yield _Edge(
            "seqlen_q",
            free,
            dtype,
            some.map(lambda n: (short, n)) if cross else st.just((short, short)),
        )
    if short >= 0 and cross:
        yield _Edge("seqlen_kv", free, dtype, some.map(lambda n: (n, short)))
    if (
        not support.cross_lengths
        and mask_kinds(support, square=False)
        and support.max_seqlen != low
    ):
        yield _Edge(
            "seqlen_kv",
            free,
            dtype,
            some.map(lambda n: (n, n - step) if n > low else (n, n + step)),
        )
    if support.max_seqlen is not None and support.max_seqlen < _LONGEST_REFUSAL:
        long = (support.max_seqlen // step + 1) * step
        yield _Edge(
            "seqlen_kv",
            free,
            dtype,
            some.map(lambda n: (n, long)) if cross else st.just((long, long)),
        )


def _supported(support: Support) -> tuple[st.SearchStrategy[int], int, int]:
    """Short lengths that queries and keys may both have, the least one above 0, and their step."""
    step = support.common_multiple
    low = up(max(support.min_seqlen, 1), step)
    most = min(low + 64, support.max_seqlen or low + 64) // step
    return st.integers(low // step, max(most, low // step)).map(lambda n: n * step), low, step


def _mask_edges(support: Support, dtype: str) -> Iterator[_Edge]:
    some, low, step = _supported(support)

    def unequal(n: int) -> tuple[int, int]:
        """Where the lengths are equal, the mask is inside."""
        shorter = n - step if n > low else n + step
        return (n, shorter) if support.longer_q else (min(n, shorter), max(n, shorter))

    for kind in drawn_words():
        only = replace(support, masks=(kind,), intersections=False)
        if kind in support.masks:
            continue
        if f"{kind.partition('.')[0]}.square" not in support.masks:
            yield _Edge("mask", only, dtype)
        elif (
            support.cross_lengths and support.max_seqlen != low
        ):  # where the lengths are equal, it is inside
            yield _Edge("mask", only, dtype, some.map(unequal))
    kinds = [kind for kind in mask_kinds(support, square=True) if kind != "full"]
    if not support.intersections and len(kinds) > 1:

        def several(draw: st.DrawFn, base: Problem) -> Problem:
            return base.but(
                mask=intersect(
                    *(
                        draw_atom(draw, kind, base.batch, base.seqlen_q, base.seqlen_kv)
                        for kind in kinds
                    )
                )
            )

        yield _Edge("mask", support, dtype, some.map(lambda n: (n, n)), several)
    if support.windows != "any" and {"window", "window.square"} & set(support.masks):
        wider = replace(support, masks=("window",), intersections=False)
        some_window = st.sampled_from([w for w in _WINDOWS if not fits(w, support.windows)])
        yield _Edge(
            "mask",
            wider,
            dtype,
            some.map(lambda n: (n, n)),
            lambda draw, base: base.but(mask=draw(some_window)),
        )
