"""Visibility: measure which keys each row reads, with equal scores and one-hot values; alignment
and inclusivity follow."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from references.masks import Causal, Mask, Window
from references.premises import Premise
from verify.judging.measuring import UNDECIDED, Measured, make_inputs, result, run_probe
from verify.judging.trial import Trial
from verify.problem import Problem

# With q = 0 exactly the keys that are read have weight, in equal shares.
NEEDS = frozenset({Premise.NORM_BOUNDED_SCORES, Premise.VISIBLE_MASS_ONLY})
_ALIGNED = {"br": "bottom-right", "tl": "top-left"}


def measure(trial: Trial) -> list[Measured]:
    """Measure the alignment of a causal mask or window, and whether a window includes its ends."""
    p = trial.problem
    if (
        not isinstance(p.mask, Causal | Window)
        or not 0 < p.seqlen_kv <= p.head_dim_v
        or not p.seqlen_q
    ):
        return []
    name = p.mask.kind if isinstance(p.mask, Causal) else "window"
    if p.mask.alignment == "tl":
        name = f"{name}.tl"
    if p.seqlen_q == p.seqlen_kv:
        name = f"{name}, square"
    possible: dict[str, Tensor] = {}
    for word, mask in _causal(p) if isinstance(p.mask, Causal) else _window(p, p.mask):
        if not any(_dense(p, mask).equal(other) for other in possible.values()):
            possible[word] = _dense(p, mask)
    wanted = _dense(p, p.mask)
    declared = next(word for word, dense in possible.items() if dense.equal(wanted))
    seen = read(trial)
    if not bool((seen == seen[:1, :1]).all()):
        word = "not the same for every head and sequence"
    else:
        matching = [word for word, dense in possible.items() if _matches(seen[0, 0], dense)]
        word = matching[0] if len(matching) == 1 else UNDECIDED if matching else "something else"
    rows = [i for i in range(p.seqlen_q) if bool(wanted[i].any())]
    at = next((i for i in rows if not seen[0, 0, i].equal(wanted[i])), rows[0])
    keys = [int(j) for j in seen[0, 0, at].nonzero()]
    evidence = (
        f"{p.mask.name}, {p.seqlen_q} queries, {p.seqlen_kv} keys: row {at} reads keys {keys}"
    )
    return [
        Measured(
            name=name, word=word, declared=declared, contradicts=word != declared, evidence=evidence
        )
    ]


def read(trial: Trial) -> Tensor:
    """Return which keys reach O, (batch, heads_q, seqlen_q, seqlen_kv) booleans: with q = 0 all
    keys that are read have equal weights."""
    p = trial.problem
    one_hot = torch.eye(p.seqlen_kv, p.head_dim_v)
    other = run_probe(
        trial, "visibility", p, make_inputs(p, torch.zeros(1), trial.expanded[1], one_hot)
    )
    return result(other.first)[..., : p.seqlen_kv].double() > 0.5 / p.seqlen_kv


def _dense(problem: Problem, mask: Mask) -> Tensor:
    return mask.dense(1, 1, problem.seqlen_q, problem.seqlen_kv)[0, 0]


def _matches(seen: Tensor, mask: Tensor) -> bool:
    """Return whether the rows that see a key under a mask read exactly the keys that they see; O of
    an empty row shows nothing."""
    live = mask.any(-1)
    return bool(live.any()) and seen[live].equal(mask[live])


def _causal(p: Problem) -> Iterator[tuple[str, Mask]]:
    """Yield words and masks: the right ones, then mistakes."""
    if p.seqlen_q == p.seqlen_kv:
        yield "diagonal included", Causal()
        yield "diagonal excluded", Window(None, -1)
        yield "one key too many", Window(None, 1)
    else:
        for alignment, word in _ALIGNED.items():
            yield word, Window(None, 0, alignment)  # type: ignore[arg-type]
            yield f"{word}, diagonal excluded", Window(None, -1, alignment)  # type: ignore[arg-type]
            yield f"{word}, one key too many", Window(None, 1, alignment)  # type: ignore[arg-type]
    yield "no mask at all", Window(None, None)


def _window(p: Problem, window: Window) -> Iterator[tuple[str, Mask]]:
    assert window.left is not None
    assert window.right is not None
    moves = {0: "inclusive", -1: "exclusive", 1: "one too far", None: "ignored"}
    square = p.seqlen_q == p.seqlen_kv
    for alignment in _ALIGNED if not square else ("br",):
        start = "" if square else f"{_ALIGNED[alignment]}, "
        for left, said_left in moves.items():
            for right, said_right in moves.items():
                sides = (
                    None if left is None else window.left + left,
                    None if right is None else window.right + right,
                )
                both = (
                    f"both ends {said_left}"
                    if left == right
                    else f"left end {said_left}, right end {said_right}"
                )
                yield f"{start}{both}", Window(*sides, alignment)  # type: ignore[arg-type]
        yield f"{start}sides swapped", Window(window.right, window.left, alignment)  # type: ignore[arg-type]
