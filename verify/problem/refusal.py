"""Whether a problem lies inside a support, and which argument a kernel must name if not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from references.quantisation import parse_quantisation
from verify.problem import Layout, Problem
from verify.problem.storage import STRIDED, storage_kind
from verify.variant import ROW_ALIGNMENT, Support


def excludes(support: Support, problem: Problem) -> tuple[str, str] | None:
    """The argument for which a kernel of that support must refuse a problem, and why; or None."""
    refused = support.refusal(problem)
    if refused is not None:
        return refused
    for name, layout in problem.layouts.items():
        if name == "dout":  # only a backward sees it
            continue
        strided = layout.word == STRIDED
        if support.layouts == "contiguous" and strided and layout != Layout():
            return f"layout_{name}", f"{layout.name} is not contiguous"
        eight = name == "out" and problem.scaled_output is not None
        size = 1 if eight else problem.format.itemsize
        aligned = layout.aligned(problem.shapes[name], size, ROW_ALIGNMENT)
        if support.layouts == "aligned" and not aligned:
            return (
                f"layout_{name}",
                f"rows of {layout.name} are not aligned to {ROW_ALIGNMENT} bytes",
            )
    return None


def plainest(support: Support) -> dict[str, Any]:
    """Fields of a Problem: the quantisation that asks least of a kernel of that support, and the
    simplest storages where it takes no strided K and V."""
    word = "none" if "none" in support.descalings else support.descalings[0]
    fields: dict[str, Any] = {"quantisation": parse_quantisation(word)}
    if STRIDED not in support.storages:
        kind = storage_kind(support.storages[0])
        fields |= {f"layout_{name}": kind() for name in kind.holds}
    return fields


def fewest_heads(support: Support) -> int:
    """Query heads of one key head, as few as a kernel of that support takes."""
    return 2 if support.grouped_heads == "only" else 1


@cache
def nearest_head_dim(dims: Sequence[int], wanted: int, *, larger: bool = False) -> int:
    """Of a support's head dims, the one nearest to `wanted`.

    dims: a tuple or a range; a session asks thousands of times for few supports.  larger: whether
    it is the larger one of two that are equally near, not the smaller one.
    """
    return min(dims, key=lambda dim: (abs(dim - wanted), -dim if larger else dim))


def inside(support: Support, problem: Problem | None) -> bool:
    """Whether that problem, its layouts included, is one that a kernel of that support must
    answer."""
    return problem is not None and excludes(support, problem) is None
