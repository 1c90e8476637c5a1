"""Rows of capped scores in 16 bits: the slack that norms give holds every pair's own bound.

The slack left out what the division by the cap, the tanh and its factor round in 16 bits, so that a
row whose scores are as large as their norms could be given less than each of its scores.
"""

from __future__ import annotations

import pytest
import torch

from references.row_blocks import row_blocks
from references.score_mods import Softcap
from tests.harness.declared import flat_numerics
from verify.judging.invariants import forward_slack, reach
from verify.problem import Problem
from verify.tolerance.forward import resolve
from verify.tolerance.score_errors import largest_score_errors
from verify.tolerance.scratch import room_on
from verify.variant import Config


@pytest.mark.parametrize("size", [0.5, 1.0, 3.0])
def test_a_row_has_no_less_slack_than_its_score(size: float) -> None:
    p = Problem(seqlen_q=1, seqlen_kv=1, head_dim=16, dtype="bfloat16", score_mod=Softcap(20.0))
    q = k = torch.full(p.shape_q, size, dtype=torch.float64)  # |q . k| is |q| |k|
    a = resolve(flat_numerics(scores="input"), Config(), p, "sm_90a")
    (block,) = row_blocks(q, k, k, p.attention)
    own = largest_score_errors(block, a, p, room_on(q.device))
    assert float(own) <= float(forward_slack(p, a, reach(p, q, k), (q, k, k)).score)
