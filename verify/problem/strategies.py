"""Hypothesis strategies over Problem; the coverage bins that a campaign must fill come along from
`verify.problem.coverage`.

Shapes, flags, the name of a distribution and a seed are drawn; elements never.  Problems are built
inside a support, not filtered.  Alternatives stand in the order in which a failure should shrink:
batch 1, one head, short, head_dim 16, full mask, default scale, contiguous, "normal", seed 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations_with_replacement
from typing import TypeVar

from hypothesis import strategies as st

from references.masks import Mask, drawn_words, intersect, kind_of
from verify.problem import ORDERS, Layout, Problem
from verify.problem.coverage import mask_kinds, square_only
from verify.problem.distributions import ordinary
from verify.problem.known_answers import GATHERS, gather_possible
from verify.variant import DESCALINGS, Declaration, Support, default_dtype_out

__all__ = ["LIMITS", "Limits", "outside", "problems"]

_HEAD_DIMS = (
    16,
    64,
    32,
    128,
    256,
    8,
    24,
    40,
    72,
    80,
    96,
    104,
    120,
    136,
    192,
    248,
    15,
    17,
    33,
    63,
    65,
    127,
    129,
    255,
    512,
)
_GROUPS = (1, 1, 2, 3, 7, 8)
_COUNTS = (1, 2, 3, 4, 5)
_POSITIVE = ("default",) * 14 + (1.0, 0.125, 0.01, 4.0)
# One draw in ten: base 2 overflows before base e, fused exponents overflow, products or partial
# gradients are flushed.
EXTREME_SCALES = (0.75, 1e8, 1e9, 2.0**100, 2.0**118, 2.0**126, 2.0**-100, 2.0**-126)
_SCALES = {
    "any": st.sampled_from(
        (*_POSITIVE, "negative", -1.0, 0.0) * 4 + EXTREME_SCALES + (-1e9, -(2.0**118))
    ),
    "positive": st.sampled_from(_POSITIVE * 4 + EXTREME_SCALES),
    "default": st.just("default"),
}
_CAPS = (20.0, 50.0, 1.0)
_SOFTCAPS = st.sampled_from((0.0,) * 6 + _CAPS)
_STYLES = st.sampled_from(("contiguous",) * 3 + ("bshd", "sbhd", "free", "free"))
_ORDERS, _PITCHES, _OFFSETS = (
    st.sampled_from(ORDERS),
    st.sampled_from((0, 8, 16, 1, 4)),
    st.sampled_from((0, 0, 8, 1, 4)),
)
_SHARED = st.sampled_from(("", "", "h", "b", "bh"))
_EXPANSIONS = {
    "q": st.sampled_from(("", "", "b")),
    "k": _SHARED,
    "v": _SHARED,
    "out": st.just(""),
    "dout": st.just(""),
}
_SEEDS, _SHORT_SEEDS = st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1)
_LONGEST_REFUSAL = 1 << 13  # a longer input, made just to see it refused, costs too much memory


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How large a problem may become.  seqlen: of nearly all problems; long_seqlen: of one in
    twenty; elements: of q, k, v and out together.  Heads and batch give way to lengths, lengths to
    pairs."""

    seqlen: int
    long_seqlen: int
    heads: int
    batch: int
    pairs: int
    elements: int


INTERPRETER = Limits(seqlen=160, long_seqlen=400, heads=4, batch=3, pairs=40_000, elements=200_000)
CPU = Limits(seqlen=300, long_seqlen=1100, heads=8, batch=4, pairs=250_000, elements=1_000_000)
GPU = Limits(seqlen=520, long_seqlen=4100, heads=24, batch=5, pairs=1 << 19, elements=1 << 20)
LIMITS = {"interpreter": INTERPRETER, "cpu": CPU, "gpu": GPU}


def problems(
    declaration: Declaration,
    *,
    dtype: str,
    limits: Limits,
    distributions: Sequence[str] | None = None,
) -> st.SearchStrategy[Problem]:
    """Problems of that dtype inside the declared support, weighted towards edges.

    distributions: names to choose from, by default all ordinary ones; with one of GATHERS, scale,
    softcap and the layout of q are such that it can be built (but see `gather_possible`: head_dim
    may be too small for the length). Raises ValueError if the support does not have the dtype.
    """
    if dtype not in declaration.support.dtypes:
        raise ValueError(f"dtype: {declaration.name} does not support {dtype}")
    names = tuple(ordinary() if distributions is None else distributions)
    if not names:
        raise ValueError("distributions: none to choose from")
    return _problems(declaration.support, dtype, limits, names)


_Pair = st.SearchStrategy[tuple[int, int]]
_T = TypeVar("_T")


@st.composite
def _problems(
    draw: st.DrawFn,
    support: Support,
    dtype: str,
    limits: Limits,
    names: tuple[str, ...],
    lengths: _Pair | None = None,
) -> Problem:
    # First what is always drawn, from the same lists; then what depends on it.  So shrinking one
    # draw shifts no other's meaning, and Hypothesis, which repeats examples with small changes,
    # rarely changes what nobody reads.
    head_dim, other_head_dim_v = (
        draw(_head_dims(support)),
        support.separate_head_dim_v and draw(_one_in(4)),
    )
    seqlen_q, seqlen_kv = draw(_lengths(support, limits) if lengths is None else lengths)
    group = draw(_one_of(_GROUPS)) if support.grouped_heads else 1
    heads_kv, batch = draw(_one_of(_COUNTS)), draw(_one_of(_COUNTS))
    name = draw(_one_of((names[0],) * 2 + names))
    scale = draw(_SCALES[support.scales])
    softcap = draw(_SOFTCAPS) if support.softcap else 0.0
    descaling = draw(_one_of(tuple(support.descalings)))
    dtype_out = draw(_one_of((default_dtype_out(dtype), *support.dtypes_out)))
    style = draw(_STYLES) if support.layouts != "contiguous" else "contiguous"
    kinds = draw(_mask_kinds(support, seqlen_q == seqlen_kv))
    seed = draw(_SEEDS)
    head_dim_v = draw(_head_dims(support)) if other_head_dim_v else head_dim
    row = head_dim + head_dim_v
    room = min(
        limits.pairs // max(seqlen_q * seqlen_kv, 1),
        limits.elements // max((seqlen_q + seqlen_kv) * row, 1),
    )
    group = _fit(group, min(room, limits.heads))
    heads_kv = _fit(heads_kv, min(room, limits.heads) // group)
    batch = _fit(batch, min(room // (group * heads_kv), limits.batch))
    mask = intersect(*(_atom(draw, kind, batch, seqlen_q, seqlen_kv) for kind in kinds))
    layouts = _layouts(draw, style, 1 if support.layouts == "any" else 8)
    if name in GATHERS:  # see `gather_possible`
        scale, softcap, layouts["q"] = scale or "default", 0.0, replace(layouts["q"], expand="")
    problem = Problem(
        batch=batch,
        heads_q=group * heads_kv,
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        mask=mask,
        softmax_scale=scale
        if isinstance(scale, float)
        else None
        if scale == "default"
        else -(head_dim**-0.5),
        softcap=softcap,
        dtype_out=dtype_out,
        descaling=descaling,
        layout_q=layouts["q"],
        layout_k=layouts["k"],
        layout_v=layouts["v"],
        layout_out=layouts["out"],
        layout_dout=layouts["dout"],
        distribution=name,
        seed=seed,
    )
    if name in GATHERS and problem.scale in EXTREME_SCALES and gather_possible(problem) is not None:
        problem = problem.but(softmax_scale=None)
    refusal = support.refusal(problem)
    assert refusal is None, f"drawn outside the support: {refusal} for {problem.name}"
    return problem


@cache
def _one_of(values: tuple[_T, ...]) -> st.SearchStrategy[_T]:
    """One of these, the simplest first.  Made once, as `_layout` is: equal tuples hold values of
    one type."""
    return st.sampled_from(values)


@cache
def _one_in(count: int) -> st.SearchStrategy[bool]:
    """True for about one draw in that many; shrinks to False."""
    return st.sampled_from((False,) * (count - 1) + (True,))


def _fit(count: int, most: int) -> int:
    """That count, or a smaller one where there is no room for it."""
    return max(1, min(count, most))


def _head_dims(support: Support) -> st.SearchStrategy[int]:
    return _head_dims_of(tuple(support.head_dims))


@cache
def _head_dims_of(dims: tuple[int, ...]) -> st.SearchStrategy[int]:
    edges = [d for d in _HEAD_DIMS if d in dims]
    simplest = edges[0] if edges and edges[0] in (16, 64) else min(dims)
    special = list(dict.fromkeys([simplest, *edges, min(dims), max(dims)]))
    return st.sampled_from(special) | st.sampled_from(special) | st.sampled_from(sorted(dims))


@cache
def _seqlens(low: int, high: int) -> st.SearchStrategy[int]:
    """A length in [low, high]: mostly at or beside a multiple of 16, more often of 64, more often a
    short one."""
    beside = [2, 3] + [
        n + side for step in (16, 64, 64) for n in range(0, high + 2, step) for side in (-1, 0, 1)
    ]
    edges = sorted([low, *(n for n in beside if low <= n <= high)])
    short = [n for n in edges if n <= max(low, 160)]
    return st.sampled_from(short) | st.sampled_from(edges) | st.integers(low, high)


def _lengths(support: Support, limits: Limits) -> _Pair:
    return _lengths_of(support.min_seqlen, support.max_seqlen, square_only(support), limits)


@cache
def _lengths_of(least: int, most: int | None, square: bool, limits: Limits) -> _Pair:
    """(seqlen_q, seqlen_kv): equal, any, decode, tall, wide, or zero."""
    low = max(least, 1)
    relations = (
        ["equal"] * 5
        + ([] if square else ["any"] * 4 + ["decode", "tall", "wide"])
        + ["zero"] * (least == 0)
    )
    zeros = ((0, 0),) if square else ((1, 0), (0, 1), (0, 0))

    @st.composite
    def pairs(draw: st.DrawFn) -> tuple[int, int]:
        reach = limits.long_seqlen if draw(_one_in(20)) else limits.seqlen
        top = max(low, min(reach, most or reach))
        few = _seqlens(low, min(top, max(low, 33)))
        relation = draw(_one_of(tuple(relations)))
        first = draw(few if relation in ("decode", "wide") else _seqlens(low, top))
        second = draw(few if relation == "tall" else _seqlens(low, top))
        if relation == "equal":
            first = second = min(first, max(low, math.isqrt(limits.pairs)))
        elif relation == "decode":
            first = low
        elif relation == "zero":
            keep_q, keep_kv = draw(_one_of(zeros))
            return first * keep_q, second * keep_kv
        return first, min(second, max(low, limits.pairs // first))

    return pairs()


def _mask_kinds(support: Support, square: bool) -> st.SearchStrategy[tuple[str, ...]]:
    """One kind, or two whose masks are to be intersected."""
    return _mask_kinds_of(tuple(mask_kinds(support, square)), support.intersections)


@cache
def _mask_kinds_of(kinds: tuple[str, ...], several: bool) -> st.SearchStrategy[tuple[str, ...]]:
    alone = [(kind,) for kind in kinds for _ in range(2 if kind == "full" else 1)]
    both = (
        [pair for pair in combinations_with_replacement(kinds, 2) if "full" not in pair]
        if several
        else []
    )
    repeats = 1 + 3 * len(both) // len(alone)  # one problem in four intersects masks
    return st.sampled_from([kind for kind in alone for _ in range(repeats)] + both)


@cache
def _parts(whole: int) -> st.SearchStrategy[int]:
    """A length in [0, whole], which is the simplest."""
    some = _seqlens(1, max(whole, 1)).map(lambda n: min(n, whole))
    return st.just(whole) | some | some | st.just(0)


@dataclass(frozen=True)
class _Choose:
    """`references.masks.Choose` by Hypothesis."""

    draw: st.DrawFn

    def one_of(self, values: tuple[_T, ...]) -> _T:
        chosen: _T = self.draw(_one_of(values))
        return chosen

    def several(self, values: tuple[_T, ...], most: int) -> list[_T]:
        return self.draw(st.lists(st.sampled_from(values), max_size=most))

    def length(self, whole: int) -> int:
        return self.draw(_parts(whole))

    def seed(self) -> int:
        return self.draw(_SHORT_SEEDS)


def _atom(draw: st.DrawFn, kind: str, batch: int, seqlen_q: int, seqlen_kv: int) -> Mask:
    mask = kind_of(kind).draw(_Choose(draw), kind, batch, seqlen_q, seqlen_kv)
    assert mask.word == kind, f"drawn as {kind}, but its word is {mask.word}: {mask.name}"
    return mask


def _layouts(draw: st.DrawFn, style: str, unit: int) -> dict[str, Layout]:
    """Layouts by tensor, whose pitch and offset are multiples of `unit` elements."""
    if style != "free":
        return dict.fromkeys(_EXPANSIONS, Layout() if style == "contiguous" else Layout(style))
    return {name: draw(_layout(name, unit)) for name in _EXPANSIONS}


@cache
def _layout(name: str, unit: int) -> st.SearchStrategy[Layout]:
    """Made once: to make and to check a strategy takes Hypothesis longer than to draw from it."""
    pitches, offsets = (extra.map(lambda n: n // unit * unit) for extra in (_PITCHES, _OFFSETS))
    return st.builds(Layout, _ORDERS, pitches, offsets, _EXPANSIONS[name])


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
    lengths: _Pair | None = None
    change: _Change = lambda draw, problem: problem


@st.composite
def _outside(
    draw: st.DrawFn, support: Support, edges: tuple[_Edge, ...], limits: Limits
) -> tuple[Problem, str]:
    edge = draw(st.sampled_from(edges))
    problem = edge.change(
        draw, draw(_problems(edge.support, edge.dtype, limits, ordinary(), edge.lengths))
    )
    refusal = support.refusal(problem)
    named = refusal[0] if refusal else None
    # `refusal` does not see layouts
    wanted = None if edge.argument.startswith("layout_") else edge.argument
    assert named == wanted, f"{named} is refused, not {wanted}: {problem.name}"
    return problem, edge.argument


def _edges(support: Support, dtype: str) -> Iterator[_Edge]:
    inner = support.head_dims
    descalings = tuple(descaling for descaling in DESCALINGS if descaling not in support.descalings)
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
            change=lambda draw, base: base.but(head_dim_v=draw(_head_dims(support))),
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
    if support.scales != "any":
        factors = st.sampled_from((2.0, -1.0, 0.0) if support.scales == "default" else (-1.0, 0.0))
        yield _Edge(
            "softmax_scale",
            support,
            dtype,
            change=lambda draw, base: base.but(softmax_scale=base.scale * draw(factors)),
        )
    if not support.softcap:
        yield _Edge(
            "softcap",
            support,
            dtype,
            change=lambda draw, base: base.but(softcap=draw(st.sampled_from(_CAPS))),
        )
    yield from _length_edges(support, dtype)
    yield from _mask_edges(support, dtype)
    rows = max(support.min_seqlen, 2)  # a pitch shows from the second row on
    if support.layouts != "any" and (support.max_seqlen or rows) >= rows:
        pitches = st.sampled_from((8, 1)) if support.layouts == "contiguous" else st.just(1)
        for name in ("q", "k", "v", "out"):
            yield _Edge(
                f"layout_{name}", support, dtype, st.just((rows, rows)), _pitched(name, pitches)
            )


def _pitched(name: str, pitches: st.SearchStrategy[int]) -> _Change:
    return lambda draw, base: base.but(**{f"layout_{name}": Layout(pitch=draw(pitches))})


def _another(draw: st.DrawFn, support: Support, base: Problem) -> int:
    """A head_dim_v that differs from head_dim, supported if there is one."""
    others = [d for d in _HEAD_DIMS if d in support.head_dims and d != base.head_dim]
    return draw(st.sampled_from(others or [base.head_dim + 8]))


def _length_edges(support: Support, dtype: str) -> Iterator[_Edge]:
    low, short = max(support.min_seqlen, 1), support.min_seqlen - 1
    free = replace(support, min_seqlen=0, max_seqlen=None, cross_lengths=True)
    some = st.integers(low, min(low + 64, support.max_seqlen or low + 64))
    cross = not square_only(support)
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
            "seqlen_kv", free, dtype, some.map(lambda n: (n, n - 1) if n > low else (n, n + 1))
        )
    if support.max_seqlen is not None and support.max_seqlen < _LONGEST_REFUSAL:
        long = support.max_seqlen + 1
        yield _Edge(
            "seqlen_kv",
            free,
            dtype,
            some.map(lambda n: (n, long)) if cross else st.just((long, long)),
        )


def _mask_edges(support: Support, dtype: str) -> Iterator[_Edge]:
    low = max(support.min_seqlen, 1)
    some = st.integers(low, min(low + 64, support.max_seqlen or low + 64))
    for kind in drawn_words():
        only = replace(support, masks=(kind,), intersections=False)
        if kind in support.masks:
            continue
        if f"{kind.partition('.')[0]}.square" not in support.masks:
            yield _Edge("mask", only, dtype)
        elif (
            support.cross_lengths and support.max_seqlen != low
        ):  # where the lengths are equal, it is inside
            yield _Edge(
                "mask", only, dtype, some.map(lambda n: (n, n - 1) if n > low else (n, n + 1))
            )
    kinds = [kind for kind in mask_kinds(support, square=True) if kind != "full"]
    if not support.intersections and len(kinds) > 1:

        def several(draw: st.DrawFn, base: Problem) -> Problem:
            return base.but(
                mask=intersect(
                    *(
                        _atom(draw, kind, base.batch, base.seqlen_q, base.seqlen_kv)
                        for kind in kinds
                    )
                )
            )

        yield _Edge("mask", support, dtype, some.map(lambda n: (n, n)), several)
