"""Factors: the properties of a problem that kernels treat apart, each with a few levels.

A fault often needs two of them together: a window whose right side is open and more than one
sequence, a ragged last tile and a narrow head.  So a covering array of problems lets every level of
a factor meet every level of every other one (`verify.campaign.covering`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations

from references.masks import Documents, Lengths, Mask, Window
from verify.problem import Layout, Problem
from verify.problem.storage import STRIDED
from verify.variant import ROW_ALIGNMENT, Config

Level = tuple[str, str]
"""The name of a factor, and that of a level."""

Pair = tuple[Level, Level]
"""Two levels of two factors, in the order of their names."""

_NARROW = 8  # keys of a window, at most
_MANY = 4  # documents, from which on there are many
_PLAIN = Layout()
_BUCKETS = (16, 32, 64, 128, 256)


def levels(problem: Problem, config: Config) -> dict[str, str]:
    """The level of each factor, by the factor's name.  Tiles are the config's, or 64 where it does
    not say.  Problems without a pair of a query and a key have none."""
    if not problem.pairs:
        return {}
    layouts = problem.layouts.values()
    return {
        "mask": _mask(problem.mask),
        "rows": _length(problem.seqlen_q, config.block_m or 64),
        "keys": _length(problem.seqlen_kv, config.block_n or 64),
        "lengths": _order(problem.seqlen_q, problem.seqlen_kv),
        "head_dim": _head_dim(problem.head_dim),
        "head_dim_v": _order(problem.head_dim_v, problem.head_dim),
        "heads": _heads(problem),
        "batch": str(problem.batch) if problem.batch < 3 else "3 or more",
        "scale": _scale(problem),
        "score_mod": "none" if problem.score_mod is None else problem.score_mod.word,
        "storage": next(
            (each.word for each in layouts if each.word != STRIDED),
            _strides(problem),
        ),
    }


def pairs(found: Mapping[str, str]) -> set[Pair]:
    """All pairs of these levels."""
    return set(combinations(sorted(found.items()), 2))


def pair_name(pair: Pair) -> str:
    """Such as "batch 2 with mask causal"."""
    (one, level), (other, second) = pair
    return f"{one} {level} with {other} {second}"


def met(problems: Iterable[tuple[Problem, Config]]) -> set[Pair]:
    """The pairs that meet in these problems."""
    found: set[Pair] = set()
    for problem, config in problems:
        found |= pairs(levels(problem, config))
    return found


def _mask(mask: Mask) -> str:
    """The mask's word, and of a window and of documents what shape they have."""
    atoms = mask.atoms
    if len(atoms) != 1:
        return "intersection"
    (atom,) = atoms
    match atom:
        case Window(left=None, right=None):
            return "window, open"
        case Window(left=None):
            return "window, left side open"
        case Window(right=None):
            return "window, right side open"
        case Window(left=int(left), right=int(right)) if left + right < _NARROW:
            return "window, narrow"
        case Documents(lengths=lengths) if 0 in lengths:
            return "documents, an empty one"
        case Documents(lengths=lengths) if len(lengths) >= _MANY:
            return "documents, many"
        case Lengths() if 0 in (*atom.q_lengths, *atom.kv_lengths):
            return "lengths, one of 0"
    return atom.word


def _length(length: int, tile: int) -> str:
    """Where a length ends in tiles."""
    if length == 1:
        return "1"
    if length < tile:
        return "below a tile"
    count, rest = divmod(length, tile)
    tiles = "one tile" if count == 1 else "tiles"
    if not rest:
        return tiles
    if rest == 1:
        return f"{tiles} and 1"
    if rest == tile - 1:
        return "tiles less 1"
    return f"{tiles} and a part"


def _order(one: int, other: int) -> str:
    return "equal" if one == other else "less" if one < other else "more"


def _head_dim(dim: int) -> str:
    bucket = next((bucket for bucket in _BUCKETS if dim <= bucket), None)
    if bucket is None:
        return f"above {_BUCKETS[-1]}"
    return str(bucket) if dim == bucket else f"below {bucket}"


def _heads(problem: Problem) -> str:
    if problem.group == 1:
        return "one" if problem.heads_q == 1 else "several"
    return "one key head" if problem.heads_kv == 1 else "grouped"


def _scale(problem: Problem) -> str:
    scale = problem.scale
    if scale <= 0:
        return "0" if scale == 0 else "negative"
    return "default" if scale == problem.head_dim**-0.5 else "other"


def _strides(problem: Problem) -> str:
    layouts = problem.layouts
    if any(isinstance(each, Layout) and each.expand for each in layouts.values()):
        return "expanded"
    if any(
        not each.aligned(problem.shapes[name], problem.format.itemsize, ROW_ALIGNMENT)
        for name, each in layouts.items()
    ):
        return "misaligned"
    strided = any(
        isinstance(each, Layout) and each != _PLAIN and replace(each, offset=0) != _PLAIN
        for each in layouts.values()
    )
    return "strided" if strided else "contiguous"
