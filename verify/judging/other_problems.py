"""Other problems: what a wrong forward may have computed instead of what it was asked.

Many wrong kernels compute attention, but another one: with the default scale, a mask that is off by
one, or another key head.  Each hypothesis here is such a problem, made from the one that was asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from references.masks import Causal, Full, Mask, Window
from verify.problem import Layout, Problem, ProblemError

Values = tuple[Tensor, Tensor, Tensor]

# Keys that a kernel reads at once, and by which it can get a ragged end wrong.
_BLOCKS = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Hypothesis:
    """Another problem, and q, k and v at its shapes.

    key: the same for all cases.  text: what follows on "the results would be right for".
    """

    key: str
    text: str
    problem: Problem
    values: Values


def hypotheses(p: Problem, values: Values) -> Iterator[Hypothesis]:
    """All that differ from the problem, on contiguous tensors; values: its q, k and v at full
    shapes.  What no problem can be, such as one of a scale below fp32's range, is left out."""
    p = p.but(**{f"layout_{name}": Layout() for name in p.layouts})
    for key, text, changes, own in _others(p, values):
        try:
            problem = p.but(**changes)
        except ProblemError:
            continue
        yield Hypothesis(key, text, problem, own)


_Other = tuple[str, str, dict[str, Any], Values]  # key, text, changes of the problem, q k v


def _others(p: Problem, values: Values) -> Iterator[_Other]:
    for text, scale in _scales(p).items():
        if scale != p.scale:
            words = f"{text} ({scale:.6g}, not {p.scale:.6g})"
            yield text, words, {"softmax_scale": scale}, values
    for mask, key in _masks(p.mask):
        yield key, key, {"mask": mask}, values
    if p.score_mod is not None:
        key = f"no {p.score_mod.word}"
        yield key, key, {"score_mod": None}, values
    q, k, v = values
    if 1 < p.heads_kv < p.heads_q:
        heads = torch.arange(p.heads_q) % p.heads_kv
        yield (
            "modulo",
            "query head h with key head h % heads_kv, instead of h // (heads_q / heads_kv)",
            {"heads_kv": p.heads_q},
            (q, k[:, heads], v[:, heads]),
        )
    if isinstance(p.mask, Full) and p.score_mod is None:
        yield from _ragged_ends(p, values)


def _scales(p: Problem) -> dict[str, float]:
    return {
        "softmax_scale = head_dim ** -0.5": p.but(softmax_scale=None).scale,
        "softmax_scale = 1, scores that are not scaled": 1.0,
        "the square of the softmax_scale": p.scale * p.scale,
    }


def _masks(mask: Mask) -> Iterator[tuple[Mask, str]]:
    if isinstance(mask, Full):
        yield Causal(), "a causal mask, where none was asked"
        return
    yield Full(), "no mask"
    if not isinstance(mask, Causal | Window):
        return
    left, right = (None, 0) if isinstance(mask, Causal) else (mask.left, mask.right)
    other = "tl" if mask.alignment == "br" else "br"
    corner = {"tl": "top left", "br": "bottom right"}[other]
    yield type(mask)(**vars(mask) | {"alignment": other}), f"a mask aligned to the {corner}"
    for by, how in ((-1, "one key less"), (1, "one key more")):
        if right is not None:
            moved = Window(left, right + by, mask.alignment)
            yield moved, f"a mask that shows {how} on the right of each row"
        if left is not None:
            moved = Window(left + by, right, mask.alignment)
            yield moved, f"a mask that shows {how} on the left of each row"


def _ragged_ends(p: Problem, values: Values) -> Iterator[_Other]:
    q, k, v = values
    for block in _BLOCKS:
        more = -p.seqlen_kv % block
        if not more:
            continue
        padded = [torch.nn.functional.pad(x, (0, 0, 0, more)) for x in (k, v)]
        yield (
            f"unmasked end, {block}",
            f"{more} further keys of zeros behind the last one: the last block of {block} has no"
            " mask",
            {"seqlen_kv": p.seqlen_kv + more},
            (q, padded[0], padded[1]),
        )
        whole = p.seqlen_kv - p.seqlen_kv % block
        if whole:
            yield (
                f"lost end, {block}",
                f"the first {whole} keys: the last block of {block}, which is not full, is lost",
                {"seqlen_kv": whole},
                (q, k[:, :, :whole], v[:, :, :whole]),
            )
