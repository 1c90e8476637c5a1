"""Hypothesis strategies over Problem; the coverage bins that a campaign must fill come along from
`verify.problem.coverage`.

Shapes, flags, the name of a distribution and a seed are drawn; elements never.  Problems are built
inside a support, not filtered.  Alternatives stand in the order in which a failure should shrink:
batch 1, one head, short, head_dim 16, full mask, default scale, contiguous, "normal", seed 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations_with_replacement
from typing import TypeVar

from hypothesis import strategies as st

from references.masks import Mask, Window, intersect, kind_of
from references.output_scale import DTYPES as EIGHT_BITS
from references.quantisation import parse_quantisation
from references.score_mods import mod_kind_of
from verify.arithmetic.dtypes import dtype_named
from verify.problem import ORDERS, Layout, Problem, Storage
from verify.problem.coverage import mask_kinds, square_only
from verify.problem.distributions import ordinary
from verify.problem.known_answers import GATHERS, gather_possible
from verify.problem.lengths import fitted
from verify.problem.storage import STRIDED, storage_kind
from verify.variant import ROW_ALIGNMENT, Declaration, Support, default_dtype_out
from verify.variant.support import fits

__all__ = ["LIMITS", "Limits", "problems"]

HEAD_DIMS = (
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
    "nonzero": st.sampled_from(
        (*_POSITIVE, "negative", -1.0) * 4 + EXTREME_SCALES + (-1e9, -(2.0**118))
    ),
    "positive": st.sampled_from(_POSITIVE * 4 + EXTREME_SCALES),
    "default": st.just("default"),
}
# Of an 8-bit O: what a quantiser gives, powers of two and others; the largest saturate most of O,
# the smallest make it subnormal or 0.
_OUTPUT_SCALES = st.sampled_from((1.0, 16.0, 104.5, 0.375, 448.0, 2.0**15, 2.0**-7))
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

    def at_most(self, largest: int) -> Limits:
        """No more pairs than that, nor elements unless a single head has more, and lengths that
        leave room for some head dims; the same for 0."""
        if not largest:
            return self
        return replace(
            self,
            seqlen=min(self.seqlen, max(largest // 64, 1)),
            long_seqlen=min(self.long_seqlen, max(largest // 32, 1)),
            pairs=min(self.pairs, largest),
            elements=min(self.elements, largest),
        )


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
    score mod and the layout of q are such that it can be built (but see `gather_possible`: head_dim
    may be too small for the length). Raises ValueError if the support does not have the dtype.
    """
    if dtype not in declaration.support.dtypes:
        raise ValueError(f"dtype: {declaration.name} does not support {dtype}")
    names = tuple(ordinary() if distributions is None else distributions)
    if not names:
        raise ValueError("distributions: none to choose from")
    return draw_problems(declaration.support, dtype, limits, names)


def _aligned_elements(dtype: str) -> int:
    """Elements of that dtype whose bytes are a multiple of ROW_ALIGNMENT, and those of a 16-bit
    output too."""
    return max(8, ROW_ALIGNMENT // dtype_named(dtype).itemsize)


LengthPair = st.SearchStrategy[tuple[int, int]]
_T = TypeVar("_T")


@st.composite
def draw_problems(
    draw: st.DrawFn,
    support: Support,
    dtype: str,
    limits: Limits,
    names: tuple[str, ...],
    lengths: LengthPair | None = None,
) -> Problem:
    # First what is always drawn, from the same lists; then what depends on it.  So shrinking one
    # draw shifts no other's meaning, and Hypothesis, which repeats examples with small changes,
    # rarely changes a draw that is not read.
    head_dim, other_head_dim_v = (
        draw(head_dims_in(support)),
        support.separate_head_dim_v and draw(_one_in(4)),
    )
    only = support.grouped_heads == "only"
    if lengths is None:
        most = replace(limits, pairs=limits.pairs // 2) if only else limits
        seqlen_q, seqlen_kv = fitted(support, *draw(_lengths(support, most)))
    else:
        seqlen_q, seqlen_kv = draw(lengths)
    groups = _GROUPS if not only else tuple(n for n in _GROUPS if n > 1)
    group = draw(_one_of(groups)) if support.grouped_heads else 1
    heads_kv, batch = draw(_one_of(_COUNTS)), draw(_one_of(_COUNTS))
    name = draw(_one_of((names[0],) * 2 + names))
    scale = draw(_SCALES[support.scales])
    mods = tuple(mod for word in support.score_mods for mod in mod_kind_of(word).gallery())
    score_mod = draw(_one_of((None,) * 6 + mods)) if mods else None
    descaling = draw(_one_of(tuple(support.descalings)))
    dtype_out = draw(_one_of((default_dtype_out(dtype), *support.dtypes_out)))
    style = draw(_STYLES) if support.layouts != "contiguous" else "contiguous"
    several = len(support.storages) > 1
    storage = storage_kind(draw(_one_of(support.storages)) if several else support.storages[0])
    kinds = draw(_mask_kinds(support, seqlen_q == seqlen_kv))
    seed = draw(_SEEDS)
    head_dim_v = draw(head_dims_in(support)) if other_head_dim_v else head_dim
    row = head_dim + head_dim_v
    room = min(
        limits.pairs // max(seqlen_q * seqlen_kv, 1),
        limits.elements // max((seqlen_q + seqlen_kv) * row, 1),
    )
    group = max(_fit(group, min(room, limits.heads)), 2 if only else 1)
    heads_kv = _fit(heads_kv, min(room, limits.heads) // group)
    batch = _fit(batch, min(room // (group * heads_kv), limits.batch))
    atoms = (draw_atom(draw, kind, batch, seqlen_q, seqlen_kv) for kind in kinds)
    mask = intersect(*(_window_of(atom, support.windows) for atom in atoms))
    unit = max(_aligned_elements(dtype), _aligned_elements(dtype_out))
    layouts = _layouts(draw, style, 1 if support.layouts == "any" else unit)
    if name in GATHERS:  # see `gather_possible`
        scale, score_mod = scale or "default", None
        layouts["q"] = layouts["q"].gradient
    if storage.word != STRIDED:
        held = storage.draw(_Choose(draw))
        if support.layouts == "any" and held.misaligned is not None and draw(_one_in(4)):
            held = held.misaligned
        layouts |= dict.fromkeys(storage.holds, held)
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
        score_mod=score_mod,
        dtype_out=dtype_out,
        output_scale=draw(_OUTPUT_SCALES) if dtype_out in EIGHT_BITS else 1.0,
        quantisation=parse_quantisation(descaling),
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


def head_dims_in(support: Support) -> st.SearchStrategy[int]:
    return _head_dims_of(tuple(support.head_dims))


@cache
def _head_dims_of(dims: tuple[int, ...]) -> st.SearchStrategy[int]:
    edges = [d for d in HEAD_DIMS if d in dims]
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


def _lengths(support: Support, limits: Limits) -> LengthPair:
    return _lengths_of(support.min_seqlen, support.max_seqlen, square_only(support), limits)


@cache
def _lengths_of(least: int, most: int | None, square: bool, limits: Limits) -> LengthPair:
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


def draw_atom(draw: st.DrawFn, kind: str, batch: int, seqlen_q: int, seqlen_kv: int) -> Mask:
    mask = kind_of(kind).draw(_Choose(draw), kind, batch, seqlen_q, seqlen_kv)
    assert mask.word == kind, f"drawn as {kind}, but its word is {mask.word}: {mask.name}"
    return mask


def _window_of(mask: Mask, kind: str) -> Mask:
    """A drawn window with the sides that a support allows; any other mask as it is."""
    if not isinstance(mask, Window) or fits(mask, kind):
        return mask
    if kind == "causal":
        return replace(mask, right=0)
    if kind == "symmetric":
        return replace(mask, right=mask.left)
    return replace(mask, left=7 if mask.left is None else mask.left, right=None)


def _layouts(draw: st.DrawFn, style: str, unit: int) -> dict[str, Storage]:
    """Layouts by tensor, whose pitch and offset are multiples of `unit` elements."""
    if style != "free":
        return dict.fromkeys(_EXPANSIONS, Layout() if style == "contiguous" else Layout(style))
    return {name: draw(_layout(name, unit)) for name in _EXPANSIONS}


@cache
def _layout(name: str, unit: int) -> st.SearchStrategy[Layout]:
    """Made once: to make and to check a strategy takes Hypothesis longer than to draw from it."""
    pitches, offsets = (extra.map(lambda n: n // unit * unit) for extra in (_PITCHES, _OFFSETS))
    return st.builds(Layout, _ORDERS, pitches, offsets, _EXPANSIONS[name])
