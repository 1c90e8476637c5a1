"""Programs of the CUDA toolkit are found where they can be, the first choice first."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from verify.cuda import toolkit


def program(folder: Path) -> str:
    """An executable file named nvdisasm in a new folder."""
    folder.mkdir(parents=True)
    path = folder / "nvdisasm"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds every place; nothing outside it is searched."""
    triton = tmp_path / "triton"
    triton.mkdir()
    (triton / "__init__.py").touch()
    spec = importlib.util.spec_from_file_location(
        "triton", triton / "__init__.py", submodule_search_locations=[str(triton)]
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(toolkit, "wheels", lambda: [tmp_path / "wheel"])
    monkeypatch.setattr(toolkit, "_INSTALLED", tmp_path / "installed")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    return tmp_path


def test_the_first_choice_comes_first(places: Path) -> None:
    assert toolkit.executables("nvdisasm") == []
    triton = program(places / "triton" / "backends" / "nvidia" / "bin")
    wheel = program(places / "wheel" / "bin")
    installed = program(places / "installed" / "bin")
    home = program(places / "home" / "bin")
    path = program(places / "path")
    assert toolkit.executables("nvdisasm") == [path, home, installed, wheel, triton]


def test_a_place_that_is_named_twice_counts_once(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = program(places / "home" / "bin")
    monkeypatch.setenv("PATH", str(places / "home" / "bin"))
    assert toolkit.executables("nvdisasm") == [home]


def test_without_triton_the_others_are_found(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert toolkit.executables("nvdisasm") == []
    wheel = program(places / "wheel" / "bin")
    assert toolkit.executables("nvdisasm") == [wheel]
