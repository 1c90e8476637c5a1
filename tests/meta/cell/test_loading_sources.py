"""What the hash of a kernel's source covers."""

from __future__ import annotations

from pathlib import Path

import pytest

from verify.bundle import ROOT
from verify.cell.loading import load
from verify.cell.sources import sources_of

HEADERS = {"ptx/split_q": "pipeline.cuh", "cute/flash_forward": "tuple_types.cuh"}


@pytest.mark.parametrize("stem", HEADERS)
def test_a_kernels_sources_are_its_own_files_and_what_it_has_of_kernels_cuda(stem: str) -> None:
    path = ROOT / "kernels" / f"{stem}.py"
    own = {path, path.with_suffix(".cu"), path.with_name("__init__.py")}
    names = ("__init__.py", "family.py", "arguments.cuh", "ptx.cuh")
    shared = {ROOT / "kernels" / "cuda" / name for name in names}
    shared |= {ROOT / "kernels" / "masks.py", path.with_name(HEADERS[stem])}
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
    # Whatever else compiles the source, it includes the same.
    texts = {Path(name).name for name in sources_of({path}, path)}
    assert texts == {
        *("split_q.py", "split_q.cu", "arguments.cuh", "ptx.cuh"),
        *(file.name for file in path.parent.glob("*.cuh")),
    }


def test_every_cuda_source_that_a_kernel_names_is_hashed_with_what_it_includes(
    tmp_path: Path,
) -> None:
    texts = {
        "kernel.py": 'SOURCES = "walk.cu", "nested/sums.cu"\n',
        "kernel.cu": '#include "first.cuh"\n',
        "walk.cu": '#if 0\n#include "second.cuh"\n#endif\n#include <cuda.h>\n',
        "nested/sums.cu": '#include "ptx.cuh"\n',
        "first.cuh": '#include "third.cuh"\n',
        "second.cuh": "",
        "third.cuh": '#include "first.cuh"\n',
        "other.cuh": "",
        "other.cu": "",
    }
    (tmp_path / "nested").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    path = tmp_path / "kernel.py"
    found = {Path(name).name for name in sources_of({path}, path)}
    assert found == {Path(name).name for name in texts if "other" not in name} | {"ptx.cuh"}


def test_the_sums_of_the_backward_in_cute_are_hashed() -> None:
    path = ROOT / "kernels" / "cute" / "flash_backward.py"
    sources = {Path(name).name for name in load(path, str(ROOT)).sources}
    assert sources >= {"flash_backward.cu", "tiles.cuh", "row_sums.cu"}
