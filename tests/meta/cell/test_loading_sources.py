"""What the hash of a kernel's source covers."""

from __future__ import annotations

from pathlib import Path

import pytest

from verify.bundle import ROOT
from verify.cell.loading import load, sources_of


@pytest.mark.parametrize("stem", ["ptx/split_q", "cute/flash_forward"])
def test_a_kernels_sources_are_its_own_files_and_what_it_has_of_kernels_cuda(stem: str) -> None:
    path = ROOT / "kernels" / f"{stem}.py"
    own = {path, path.with_suffix(".cu"), path.with_name("__init__.py")}
    names = ("__init__.py", "family.py", "arguments.cuh", "ptx.cuh")
    shared = {ROOT / "kernels" / "cuda" / name for name in names}
    shared |= {ROOT / "kernels" / "masks.py", *path.parent.glob("*.cuh")}
    shared |= {ROOT / "verify" / "cuda" / name for name in ("__init__.py", "compile.py")}
    assert {Path(name) for name in load(path, str(ROOT)).sources} >= own | shared


def test_only_imported_helpers_are_hashed() -> None:
    folder, path = ROOT / "kernels" / "cuda", ROOT / "kernels" / "ptx" / "split_q.py"
    compiler = ROOT / "verify" / "cuda"
    imported = {
        path,
        compiler / "compile.py",
        folder / "__init__.py",
        folder.parent / "triton" / "common.py",
        compiler.parent / "variant" / "__init__.py",
    }
    assert set(map(Path, sources_of(imported, path))) == {
        path,
        path.with_suffix(".cu"),
        compiler / "compile.py",
        folder / "__init__.py",
        folder / "arguments.cuh",
        folder / "ptx.cuh",
        *path.parent.glob("*.cuh"),
    }
    assert sources_of({path}, path) == (str(path.with_suffix(".cu")), str(path))
