"""The quick starts of docs/quick-starts/: `.ci/wheel` plays each from the built wheel, and the
thorough tier here from the checkout."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.harness.quick_starts import PAGES, ROOT, Page, PlayError, play, read

NAMES = [page.stem for page in PAGES]


def programs(folder: Path) -> dict[str, str]:
    """Variables with which `verify` and `pytest` are those of this checkout."""
    folder.mkdir()
    for name in ("verify", "pytest"):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {name} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    packages = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {"PATH": path, "PYTHONPATH": packages, "VERIFY_BOOTSTRAP": "0"}


def test_there_is_one_for_each_reader() -> None:
    assert NAMES == ["ci", "cuda", "library", "triton"]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_page_has_files_and_commands_that_judge(page: Path) -> None:
    found = read(page)
    assert found.files
    assert any(words.startswith(("verify run", "pytest")) for words, _ in found.commands)
    for name, text in found.files.items():
        if name.endswith(".py"):
            compile(text, name, "exec")


def test_exit_codes_are_read_and_held(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`a.py`:\n\n```python\nx = 1\n```\n\n```sh\ncat a.py\nfalse  # exits with 1\n```\n",
        encoding="utf-8",
    )
    found = read(page)
    assert found == Page({"a.py": "x = 1\n"}, (("cat a.py", 0), ("false", 1)))
    play(found, tmp_path / "right", {}, device=False)
    with pytest.raises(PlayError, match=r"^false: exit code 1, not 0"):
        play(Page({}, (("false", 0),)), tmp_path, {}, device=False)


@pytest.mark.thorough
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_it_goes_as_the_page_says(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    play(read(page), folder, programs(tmp_path / "bin"), device=torch.cuda.is_available())
