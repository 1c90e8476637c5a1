"""The agenda's edges: inside every support, few, and such that the interpreter bears them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.meta.trials import DECLARED
from verify.agenda import edges
from verify.court import Docket
from verify.problem import Problem
from verify.relations import inside
from verify.variant import MASK_KINDS, Config, Support

WHOLE = replace(DECLARED.support, masks=MASK_KINDS, min_seqlen=0)
SUPPORTS = {
    "whole": WHOLE,
    "full only": replace(WHOLE, masks=("full",)),
    "square": replace(WHOLE, cross_lengths=False),
    "short": replace(WHOLE, max_seqlen=512),
    "with keys": replace(WHOLE, min_seqlen=1),
    "default scale, packed, wide": replace(WHOLE, scales="default", layouts="contiguous", head_dims=(64, 128)),
}


def asked(support: Support, group: str, dtype: str = "float16") -> list[Problem]:
    declaration = replace(DECLARED, support=support, entries=("forward", "backward"))
    return edges(Docket(declaration, Config(block_m=32, block_n=128), dtype, group))


@pytest.mark.parametrize("group", ["accuracy", "gradients"])
@pytest.mark.parametrize("support", SUPPORTS.values(), ids=SUPPORTS)
def test_edges_are_inside_the_support(support: Support, group: str) -> None:
    found = asked(support, group)
    assert all(inside(support, problem) for problem in found)
    assert len(found) == len(set(found)) <= 14
    assert sum(problem.pairs for problem in found) < 600_000
    assert len(asked(support, group, "float32")) <= 2  # one dtype is enough for lengths


def test_edges_are_where_random_lengths_hardly_get() -> None:
    forward, backward = asked(WHOLE, "accuracy"), asked(WHOLE, "gradients")
    assert [(p.seqlen_q, p.seqlen_kv, p.mask.name) for p in forward] == [
        (0, 33, "full"),
        (33, 0, "full"),
        (256, 257, "causal"),
        (256, 255, "causal"),
        (17, 517, "window.275.0"),
        (517, 17, "window.275.0.tl"),
        (33, 33, "full"),
        (9, 9, "full"),
        (1, 33, "full"),
        (5, 33, "full"),
        *[(33, 33, "full")] * 2,
        (1, 32790, "window.70.0"),
        (1041, 17, "documents.17"),
    ]
    assert set(forward) - set(backward) == {problem for problem in forward if problem.seqlen_kv > 1024}
    assert set(backward) <= set(forward)


def test_what_lies_before_the_edge_is_hidden_where_a_mask_can() -> None:
    *_, wide, tall = asked(WHOLE, "accuracy")
    seen = tall.mask.dense(1, 1, tall.seqlen_q, tall.seqlen_kv)[0, 0].any(-1)
    assert seen.nonzero().flatten().tolist() == list(range(1024, 1041))
    low, high = wide.mask.row_bounds(1, 1, wide.seqlen_kv)
    assert int(low) < 1 << 15 < int(high) == wide.seqlen_kv
    *_, wide = asked(SUPPORTS["full only"], "accuracy")
    assert wide.mask.name == "full"


def test_edges_reach_past_what_is_drawn() -> None:
    """More heads, rows of a group, sequences and pairs of both than a table of 32, 128 or 256 has; scales far from 1; a window
    in which a whole tile lies; three orders of memory at once."""
    found = asked(WHOLE, "accuracy")
    assert max(p.batch for p in found) > 32
    assert max(p.batch * p.heads_q for p in found) > 256
    assert {p.seqlen_q for p in found if p.group > 32} == {1, 5}
    assert {abs(p.scale) for p in found} >= {32.0, 2.0**-12}
    assert any(len({p.layout_q.order, p.layout_k.order, p.layout_v.order}) == 3 for p in found)
    window = next(p for p in found if p.mask.name == "window.275.0")
    seen = window.mask.dense(1, 1, window.seqlen_q, window.seqlen_kv)[0, 0]
    assert [bool(tile.all()) for tile in seen[:, :512].unflatten(1, (4, 128)).unbind(1)] == [False, False, True, False]
