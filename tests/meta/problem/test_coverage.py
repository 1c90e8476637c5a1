"""Coverage bins: a bin that needs all rows of a mask, held against the whole mask."""

from __future__ import annotations

import pytest

from references.masks import Causal, Lengths, Mask, gallery
from references.masks.dense import Dense
from verify.problem import Problem
from verify.problem.coverage import coverage_bins
from verify.variant import Config

FEW = 64  # keys, which a search begins with
MASKS = (
    *gallery(),
    *(Dense(percent, seed) for percent in (0, 1, 10) for seed in range(4)),
    *(Causal() & Dense(percent, 3) for percent in (1, 50, 100)),
)


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
def test_a_row_without_keys_is_found(mask: Mask) -> None:
    """Also where a row sees none of the first keys, but a later one."""
    for rows, keys in ((12, 24), (3, FEW), (40, FEW + 1), (9, 200)):
        if (rows, keys) != (12, 24) and any(isinstance(part, Lengths) for part in mask.atoms):
            continue
        try:
            problem = Problem(
                seqlen_q=rows, seqlen_kv=keys, head_dim=16, dtype="float16", mask=mask
            )
        except ValueError:  # documents of another length
            continue
        seen = mask.dense(1, 1, rows, keys)[0, 0].any(-1)
        assert ("empty_row" in coverage_bins(problem, Config())) == (not bool(seen.all()))
