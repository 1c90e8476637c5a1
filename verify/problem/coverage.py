"""Coverage bins: what a campaign's problems have exercised, and what they must."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from references.masks import Causal, Intersection, Lengths, Mask, Window, drawn_words, kind_of
from references.output_scale import DTYPES as EIGHT_BITS
from references.quantisation import KINDS as QUANTISATIONS
from references.score_mods import mod_words
from verify.arithmetic.dtypes import dtype_named
from verify.problem import Layout, Problem
from verify.problem.distributions import ordinary
from verify.problem.storage import STRIDED, storage_words
from verify.variant import ROW_ALIGNMENT, Config, Support

_BINS = (
    "kv_tiles>=3",
    "ragged_tail",
    "seqlen_q<seqlen_kv",
    "seqlen_q>seqlen_kv",
    "decode",
    "zero_length",
    "empty_row",
    "late_maximum",
    "grouped_heads",
    "descaling",
    "descaling_by_head",
    "descaling_by_block",
    "output_scale",
    "head_dim_v!=head_dim",
    "scale<0",
    "scale=0",
    "strided",
    "expanded",
    "misaligned",
    "mask:intersection",
    *(f"distribution:{name}" for name in ordinary()),
)


def bins_required() -> tuple[str, ...]:
    """The bins that all supports together fill."""
    masks = (f"mask:{word}" for word in drawn_words())
    storages = (f"storage:{word}" for word in storage_words() if word != STRIDED)
    return (*_BINS, *mod_words(), *masks, *storages)


_FEW = 64  # keys
_LATE_MAXIMUM = "late_maximum"
_WITHOUT_PAIRS = ("zero_length", "empty_row")  # where no query has a key, nothing else is exercised


def coverage_bins(problem: Problem, config: Config) -> set[str]:
    """The bins that a problem fills for that config; the required ones are `bins_required`.

    Tiles are the config's, or 64 where it does not say.  "late_maximum": logits grow with the key
    index over more than one tile, so every block rescales.  "misaligned": a tensor does not start,
    or its rows do not, at a multiple of 16 bytes.
    """
    found = set(_of_any_values(problem.plain_valued, config))
    if problem.distribution != "increasing":
        found.discard(_LATE_MAXIMUM)
    if problem.pairs:
        found.add(f"distribution:{problem.distribution}")
    return found


@lru_cache(maxsize=1 << 10)  # cases that are judged together differ in their values alone
def _of_any_values(problem: Problem, config: Config) -> frozenset[str]:
    """The bins of a problem but for its distribution's, as if logits grew with the key."""
    tile_m, tile_n = config.block_m or 64, config.block_n or 64
    atoms = problem.mask.atoms
    layouts = {
        name: layout
        for name, layout in problem.layouts.items()
        if getattr(problem, f"shape_{name}")[2]
    }
    lengths = [
        n
        for part in atoms
        if isinstance(part, Lengths)
        for n in (*part.q_lengths, *part.kv_lengths)
    ]
    scale, both = problem.scale, (problem.seqlen_q, problem.seqlen_kv)
    # with one key head no map of heads can be wrong
    grouped = problem.group > 1 and problem.heads_kv > 1
    found = {
        "kv_tiles>=3": problem.seqlen_kv > 2 * tile_n,
        "ragged_tail": bool(problem.seqlen_q % tile_m or problem.seqlen_kv % tile_n),
        "seqlen_q<seqlen_kv": 0 < both[0] < both[1],
        "seqlen_q>seqlen_kv": 0 < both[1] < both[0],
        "decode": problem.seqlen_q == 1 < problem.seqlen_kv,
        "zero_length": 0 in (*both, *lengths),
        "empty_row": _has_empty_row(problem),
        _LATE_MAXIMUM: problem.seqlen_kv > tile_n and scale != 0 and both[0] > 0,
        "grouped_heads": grouped,
        "descaling": problem.quantisation.scaled,
        "descaling_by_head": problem.descaling == "head" and grouped,
        "descaling_by_block": 0 < problem.quantisation.keys < problem.seqlen_kv,
        "output_scale": problem.output_scale != 1,
        "head_dim_v!=head_dim": problem.head_dim_v != problem.head_dim,
        "scale<0": scale < 0,
        "scale=0": scale == 0,
        "strided": any(
            isinstance(layout, Layout) and replace(layout, offset=0) != Layout()
            for layout in layouts.values()
        ),
        "expanded": any(layout.expand for layout in layouts.values()),
        "misaligned": any(
            not layout.aligned(problem.shapes[name], problem.format.itemsize, ROW_ALIGNMENT)
            for name, layout in layouts.items()
        ),
        "mask:intersection": isinstance(problem.mask, Intersection),
    }
    found |= {f"mask:{part.word}": True for part in atoms}
    if problem.score_mod is not None:
        found[problem.score_mod.word] = True
    found |= {f"storage:{x.word}": True for x in layouts.values() if x.word != STRIDED}
    return frozenset(
        name
        for name, filled in found.items()
        if filled and (problem.pairs or name in _WITHOUT_PAIRS)
    )


def bins_reachable(support: Support, config: Config | None = None) -> set[str]:
    """The required bins that problems inside that support can fill, in every dtype and, if one is
    given, with that config."""
    masks = mask_kinds(support, square=True)
    longest = float("inf") if support.max_seqlen is None else support.max_seqlen
    tile_m = (config or Config()).block_m or 64
    tile_n = (config or Config()).block_n or 64
    steps = (support.seqlen_q_multiple, support.seqlen_kv_multiple)
    steps = (support.common_multiple,) * 2 if square_only(support) else steps
    free = not square_only(support) and longest > max(support.min_seqlen, 1)
    # Where lengths differ, there may be no key at all, or queries that stand before the first one.
    late = (support.longer_q and support.min_seqlen == 0) or _can_empty_rows(support, square=False)
    aligned = all(
        d * dtype_named(name).itemsize % 16 == 0
        for name in support.dtypes
        for d in support.head_dims
    )
    closed = {
        "kv_tiles>=3": longest > 2 * tile_n,
        "late_maximum": longest > tile_n,
        "ragged_tail": bool(steps[0] % tile_m or steps[1] % tile_n),
        "seqlen_q<seqlen_kv": free,
        "seqlen_q>seqlen_kv": free and support.longer_q,
        "decode": free and support.min_seqlen <= 1 and support.seqlen_q_multiple == 1,
        "zero_length": support.min_seqlen == 0 or "lengths" in masks,
        "empty_row": _can_empty_rows(support, square=True) or (free and late),
        "grouped_heads": bool(support.grouped_heads),
        "descaling": bool(set(support.descalings) - {"none"}),
        "descaling_by_head": "head" in support.descalings and bool(support.grouped_heads),
        "descaling_by_block": any(
            0 < QUANTISATIONS[word].keys < longest for word in support.descalings
        ),
        "output_scale": any(name in EIGHT_BITS for name in support.dtypes_out),
        "head_dim_v!=head_dim": support.separate_head_dim_v and len(support.head_dims) > 1,
        "scale<0": support.scales in ("any", "nonzero"),
        "scale=0": support.scales == "any",
        **{word: word in support.score_mods for word in mod_words()},
        "strided": support.layouts != "contiguous",
        "expanded": support.layouts != "contiguous",
        "misaligned": support.layouts == "any" or (support.layouts == "contiguous" and not aligned),
        "mask:intersection": support.intersections and len(set(masks) - {"full"}) > 1,
        **{f"mask:{word}": word in masks for word in drawn_words()},
        **{f"storage:{word}": word in support.storages for word in storage_words()},
    }
    return {name for name in bins_required() if closed.get(name, True)}


def _can_empty_rows(support: Support, *, square: bool) -> bool:
    """Whether a mask of that support can leave a row without a key, at such lengths."""
    words = mask_kinds(support, square)
    if not support.longer_q:  # then every query's diagonal is at a key
        words = [word for word in words if not issubclass(kind_of(word), Causal | Window)]
    return any(kind_of(word).can_empty_rows(word, square=square) for word in words)


def square_only(support: Support) -> bool:
    """Whether seqlen_q must equal seqlen_kv."""
    return not support.cross_lengths or all(word.endswith(".square") for word in support.masks)


def mask_kinds(support: Support, square: bool) -> list[str]:
    """Words that masks are drawn by, as far as the support allows them for such lengths.

    "causal.square" becomes both alignments, which agree there.
    """
    allowed = set(support.masks)
    for word in support.masks if square else ():
        if word.endswith(".square"):
            allowed |= set(kind_of(word).words)
    return [word for word in drawn_words() if word in allowed]


def _has_empty_row(problem: Problem) -> bool:
    """Whether some query sees no key; where rows see no single interval, only the first head is
    searched."""
    return _empties_row(problem.mask, problem.batch, problem.seqlen_q, problem.seqlen_kv)


@lru_cache(maxsize=1 << 14)  # the same problems are counted in every dtype and config
def _empties_row(mask: Mask, batch: int, seqlen_q: int, seqlen_kv: int) -> bool:
    if not seqlen_q or not seqlen_kv:
        return seqlen_q > 0
    try:
        low, high = mask.row_bounds(batch, seqlen_q, seqlen_kv)
    except ValueError:
        mod = mask.mod(seqlen_q, seqlen_kv)
        rows = torch.arange(min(seqlen_q, max((1 << 20) // seqlen_kv, 1)))
        zero = torch.tensor(0)
        # Nearly all rows see one of the first keys.
        for keys in torch.arange(seqlen_kv).tensor_split((_FEW,)):
            seen = mod(zero, zero, rows[:, None], keys).expand(len(rows), len(keys)).any(-1)
            rows = rows[~seen]
        return len(rows) > 0
    return bool((high == low).any())
