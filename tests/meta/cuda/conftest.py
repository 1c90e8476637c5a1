"""What several tests of compiling and launching need."""

from __future__ import annotations

from pathlib import Path

import pytest

from verify.cuda.compile import (
    Source,
)

DOUBLED = """
#include "factor.h"
extern "C" __global__ void doubled(float* x) { x[threadIdx.x] *= FACTOR; }
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """A source with its header, and an empty cache."""
    monkeypatch.setenv("VERIFY_CUDA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "headers").mkdir()
    (tmp_path / "headers" / "factor.h").write_text("#define FACTOR 2\n")
    (tmp_path / "doubled.cu").write_text(DOUBLED)
    return Source(tmp_path / "doubled.cu", "doubled", includes=(tmp_path / "headers",))
