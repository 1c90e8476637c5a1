"""ldmatrix of the raw-PTX kernels meets no bank conflict, as ncu counts on a GPU; a planted one
does.

Without a GPU or without ncu these tests are listed as skipped; tests/meta/kernels counts conflicts
of the same sources on the CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.planted.conflicts import PITCHES, source
from verify.bundle import ROOT
from verify.cell.discovery import collection, roster
from verify.cell.process import PLAIN_CUDA, ForkServer
from verify.cuda.compile import compilable, compile_source
from verify.cuda.sass import count, listing
from verify.cuda.toolkit import executables
from verify.problem import Problem
from verify.profiling.metrics import LDSM_CONFLICTS
from verify.profiling.session import Launch, profile
from verify.profiling.tool import find
from verify.variant import Declaration

PLANTED = ROOT / "tests" / "planted" / "conflicts.py"
FILES = [path for path in collection() if path.parent.name == "ptx"]
SEQLEN = 512  # several tiles of Q and of K of every config
_MISSING = "no CUDA device" if not torch.cuda.is_available() else "" if find() else "no ncu"
counts = pytest.mark.skipif(bool(_MISSING), reason=_MISSING)


def declarations(file: Path) -> list[Declaration]:
    """The variants of a kernel file on the GPU; skips the test if one cannot run here."""
    fork_server = ForkServer(PLAIN_CUDA)
    try:
        listed = roster([file], fork_server)
    finally:
        fork_server.close()
    assert not listed.failures
    for declaration in listed.declarations:
        if declaration.unavailable is not None:
            pytest.skip(f"{declaration.ref}: {declaration.unavailable}")
    return list(listed.declarations)


def conflicts(declaration: Declaration, folder: Path) -> dict[str, float | None]:
    """Bank conflicts of ldmatrix, by config and head dim: the smallest, and the largest up to
    128."""
    support = declaration.support
    dims = [dim for dim in declaration.head_dim_buckets or support.head_dims if dim <= 128]
    sizes = {"heads_q": 2, "heads_kv": 2, "seqlen_q": SEQLEN, "seqlen_kv": SEQLEN}
    problems = [
        Problem(head_dim=dim, dtype=support.dtypes[0], **sizes)
        for dim in sorted({min(dims), max(dims)})
    ]
    asked = [Launch(config, problem) for config in declaration.configs for problem in problems]
    profiler = find()
    assert profiler is not None
    kernels = profile(
        profiler, PLAIN_CUDA, declaration, asked, folder, full=False, metrics=[LDSM_CONFLICTS]
    )
    assert len(kernels) == len(asked), "a launch of these variants starts one kernel"
    return {
        f"{one.config.name} d={one.problem.head_dim}": kernel.values["conflicts_ldsm"]
        for one, kernel in zip(asked, kernels, strict=True)
    }


@counts
@pytest.mark.long(120)  # a process under ncu for each variant
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_ldmatrix_meets_no_bank_conflict(file: Path, tmp_path: Path) -> None:
    for declaration in declarations(file):
        counted = conflicts(declaration, tmp_path / declaration.name)
        assert set(counted.values()) == {0.0}, counted


@counts
def test_a_planted_conflict_is_counted(tmp_path: Path) -> None:
    (declaration,) = declarations(PLANTED)
    counted = conflicts(declaration, tmp_path)
    within, without = (counted[f"default-pitch_{pitch} d=64"] for pitch in PITCHES)
    assert within is not None
    assert within > 0
    assert without == 0


@pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")
@pytest.mark.skipif(not executables("nvdisasm"), reason="no nvdisasm")
def test_the_planted_kernels_hold_ldmatrix() -> None:
    for pitch in PITCHES:
        binary = compile_source(source(pitch), "sm_90a")
        assert count(listing(binary.cubin), binary.entry).kernel["LDSM"] == 1
