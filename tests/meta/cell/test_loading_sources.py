"""What the hash of a kernel's source covers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from verify.bundle import ROOT
from verify.cell import sources
from verify.cell.arena import Arena
from verify.cell.breach import Breach
from verify.cell.discovery import roster
from verify.cell.loading import load
from verify.cell.named_imports import named_from, possible_from
from verify.cell.process import Cell, ForkServer, Reply
from verify.cell.sources import sources_of
from verify.judging.trial import Trial
from verify.problem import Problem

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


def test_what_a_text_names_is_found_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for stem in ("math", "one", "two", "three", "four", "five", "six", "unnamed"):
        (folder / f"{stem}.py").write_text("import six as seven\n" if stem == "five" else "")
    text = (
        "import math, os, one, numpy\nfrom two import name\nfrom . import three\n"
        "from mine import four\ndef late():\n    import mine.five\n    from other import unnamed\n"
    )
    path = folder / "kernel.py"
    path.write_text(text)
    assert {file.stem for file in named_from(path)} == {
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
    }
    path.write_text("from . import math\nfrom .one import name\n")
    assert {file.stem for file in named_from(path)} == {"math", "one"}
    path.write_text("import one (")
    assert named_from(path) == set()
    calls = (
        'import_module("one")',
        'importlib.import_module(".two", __package__)',
        '__import__("mine.three")',
        'importlib.import_module("..four", __package__)',
        'importlib.import_module("other.five")',
        'importlib.import_module("math")',
    )
    path.write_text("import importlib\nfrom importlib import import_module\n" + "\n".join(calls))
    assert {file.stem for file in named_from(path)} == {"one", "two", "three"}
    assert possible_from(path) == set()


COMPUTED = (
    'import_module("on" + "e")',
    "importlib.import_module(name)",
    "get = __import__",
    "importlib.util.spec_from_file_location(name, path)",
    "runpy.run_path(path)",
    "from importlib import import_module as get",
    "from two import name",  # which computes one
)


@pytest.mark.parametrize("text", COMPUTED)
def test_a_computed_name_can_be_any_file_of_the_folder(text: str, tmp_path: Path) -> None:
    (tmp_path / "within").mkdir()
    for stem in ("one", "three", "kernel", "within/four", "broken"):
        (tmp_path / f"{stem}.py").write_text("import one (" if stem == "broken" else "")
    (tmp_path / "two.py").write_text("def late(name):\n    return __import__(name)\n")
    (tmp_path / "gone.py").symlink_to("nowhere.py")
    path = tmp_path / "kernel.py"
    path.write_text(text)
    assert {file.stem for file in possible_from(path)} == {"one", "two", "three", "broken"}
    path.write_text("from importlib import import_module\nfrom three import one\n")
    assert possible_from(path) == set()


LAZY = """
import importlib
import sys


def attention(q, k, v):
    {imports}
    return helper.attention(q, k, v)
"""
HELPER = """
import torch


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) * {scale}, -1) @ v
"""


def _lazy(folder: Path, imports: str, scale: str = "q.shape[-1] ** -0.5") -> Path:
    (folder / "helper.py").write_text(HELPER.format(scale=scale))
    path = folder / "lazy.py"
    path.write_text(LAZY.format(imports=imports))
    return path


LITERAL = 'helper = importlib.import_module("helper")'
JOINED = 'helper = importlib.import_module("".join(["hel", "per"]))'
HIDDEN = 'helper = getattr(importlib, "import_" + "module")("helper")'


@pytest.mark.parametrize("imports", ["import helper", "from deep import helper", LITERAL, JOINED])
def test_a_file_that_only_a_function_imports_is_hashed(
    imports: str, tmp_path: Path, fork_server: ForkServer
) -> None:
    (tmp_path / "deep.py").write_text("def get():\n    import helper\n")
    (before,) = roster([_lazy(tmp_path, imports)], fork_server).declarations
    (same,) = roster([_lazy(tmp_path, imports)], fork_server).declarations
    (after,) = roster([_lazy(tmp_path, imports, scale="2.0")], fork_server).declarations
    assert before.source_hash == same.source_hash != after.source_hash


def _launched(path: Path, fork_server: ForkServer) -> list[Reply]:
    """The replies to two launches in one process."""
    (declaration,) = roster([path], fork_server).declarations
    problem = Problem(seqlen_q=2, seqlen_kv=3, head_dim=32, dtype="float32")
    cell, arena = Cell(fork_server), Arena()
    try:
        trial = Trial(declaration, declaration.configs[0], problem, cell, arena, arch="cpu")
        return [trial.run(tag).reply for tag in ("one", "two")]
    finally:
        cell.close()
        arena.close()


def test_a_launch_that_imports_what_no_statement_names_is_told(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    path = _lazy(tmp_path, HIDDEN)
    for reply in _launched(path, fork_server):
        assert reply.status == "breach", "in every launch, not in the first one alone"
        assert reply.message.startswith("imports helper.py only when it is launched")
    stdlib = 'helper = importlib.import_module("math")\n    import helper'
    for right in ("import helper", stdlib, LITERAL, JOINED):
        replies = _launched(_lazy(tmp_path, right), fork_server)
        assert [reply.status for reply in replies] == ["ok", "ok"]


def test_files_of_packages_beside_an_installed_kernel_are_no_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = sources.LateImports()
    monkeypatch.setattr(sources, "_INSTALLED", {str(tmp_path)})
    late.loaded(tmp_path / "kernel.py", [])
    (tmp_path / "installed_beside.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("installed_beside")
    late.check()
    monkeypatch.setattr(sources, "_INSTALLED", set())
    fresh = sources.LateImports()
    fresh._folders.add(tmp_path)
    with pytest.raises(Breach, match=r"imports installed_beside\.py only when it is launched"):
        fresh.check()


def test_modules_whose_files_are_known_are_sources_as_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as they are the modules of that name; a later one of that name has its own file."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("sources_before", "sources_after", "sources_gone"):
        (tmp_path / "real" / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "link")
    monkeypatch.setattr(sources, "_known", sources._Known())
    before, gone = map(importlib.import_module, ("sources_before", "sources_gone"))
    assert _of_folder(tmp_path / "real") == {"sources_before.py": before, "sources_gone.py": gone}
    sources.know_modules()
    monkeypatch.delitem(sys.modules, "sources_gone")
    after = importlib.import_module("sources_after")
    assert _of_folder(tmp_path / "real") == {"sources_before.py": before, "sources_after.py": after}
    again = importlib.import_module("sources_gone")
    assert again is not gone
    assert _of_folder(tmp_path / "real")["sources_gone.py"] is again


def _of_folder(folder: Path) -> dict[str, ModuleType]:
    modules = sources.modules_for(folder / "kernel.py").items()
    return {file.name: module for file, module in modules if file.parent == folder}
