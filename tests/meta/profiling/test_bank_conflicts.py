"""ldmatrix of the raw-PTX kernels meets no bank conflict, as ncu counts on a GPU.

Without a GPU or without ncu this is listed as skipped; tests/meta/kernels counts conflicts of the
same sources on the CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from verify.cell.discovery import collection, roster
from verify.cell.process import PLAIN_CUDA, ForkServer
from verify.problem import Problem
from verify.profiling.metrics import LDSM_CONFLICTS
from verify.profiling.session import Launch, profile
from verify.profiling.tool import find
from verify.variant import Declaration

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(find() is None, reason="no ncu"),
]
FILES = [path for path in collection() if path.parent.name == "ptx"]
SEQLEN = 512  # several tiles of Q and of K of every config


def launches(declaration: Declaration) -> list[Launch]:
    """Every config at the smallest and at the largest head dim up to 128."""
    dims = [dim for dim in declaration.head_dim_buckets if dim <= 128] or [
        min(declaration.head_dim_buckets)
    ]
    problems = [
        Problem(
            heads_q=2,
            heads_kv=2,
            seqlen_q=SEQLEN,
            seqlen_kv=SEQLEN,
            head_dim=dim,
            dtype=declaration.support.dtypes[0],
        )
        for dim in sorted({min(dims), max(dims)})
    ]
    return [Launch(config, problem) for config in declaration.configs for problem in problems]


@pytest.mark.long(120)  # a process under ncu for each variant
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_ldmatrix_meets_no_bank_conflict(file: Path, tmp_path: Path) -> None:
    fork_server = ForkServer(PLAIN_CUDA)
    try:
        declarations = roster([file], fork_server).declarations
    finally:
        fork_server.close()
    for declaration in declarations:
        if declaration.unavailable is not None:
            pytest.skip(declaration.unavailable)
        asked = launches(declaration)
        kernels = profile(
            find(), PLAIN_CUDA, declaration, asked, tmp_path, full=False, metrics=[LDSM_CONFLICTS]
        )
        assert len(kernels) == len(asked), "a launch starts one kernel"
        counted = {
            f"{one.config.name} d={one.problem.head_dim}": kernel.values["conflicts_ldsm"]
            for one, kernel in zip(asked, kernels, strict=True)
        }
        assert set(counted.values()) == {0.0}, counted
