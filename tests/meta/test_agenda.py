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
    assert len(found) == len(set(found)) <= 6
    assert len(asked(support, group, "float32")) <= 2  # one dtype is enough for lengths


def test_edges_are_where_random_lengths_hardly_get() -> None:
    forward, backward = asked(WHOLE, "accuracy"), asked(WHOLE, "gradients")
    assert [(p.seqlen_q, p.seqlen_kv, p.mask.name) for p in forward] == [
        (0, 33, "full"),
        (33, 0, "full"),
        (256, 257, "causal"),
        (256, 255, "causal"),
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
