"""Another Triton for the processes that run kernels (VERIFY_TRITON)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness.kernel_files import Writer
from verify.cell.discovery import roster
from verify.cell.fork_server import environment_of
from verify.cell.process import PLAIN_CPU, ForkServer
from verify.machine import device, other_triton, settings
from verify.machine.settings import TRITON, SettingError


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a package that says it is Triton 3.8.1."""
    package = tmp_path / "other" / "triton"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""x"""\n__version__ = \'3.8.1\'\n', encoding="utf-8")
    monkeypatch.setenv(TRITON, str(package.parent))
    return package.parent


def test_reports_name_the_triton_that_kernels_get(
    other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (other_triton.version(), other_triton.release()) == ("3.8.1", (3, 8))
    assert device.fingerprint()["triton"] == "3.8.1"
    monkeypatch.delenv(TRITON)
    assert device.fingerprint()["triton"] != "3.8.1"
    assert other_triton.folder() is None


def test_the_folder_comes_first_on_the_path_of_a_kernel_process(
    other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    path = environment_of(())["PYTHONPATH"].split(os.pathsep)
    assert path[-2:] == [str(other), "/theirs"]
    monkeypatch.delenv(TRITON)
    assert str(other) not in environment_of(())["PYTHONPATH"]


@pytest.mark.long(3)
def test_a_kernel_imports_that_triton(other: Path, write: Writer) -> None:
    file = write()
    source = file.read_text(encoding="utf-8")
    file.write_text("import triton\nassert triton.__version__ == '3.8.1'\n" + source)
    server = ForkServer(PLAIN_CPU)
    try:
        loaded = roster([file], server)
    finally:
        server.close()
    assert not loaded.failures
    assert len(loaded.declarations) == 1


def test_a_folder_without_triton_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRITON, str(tmp_path))
    with pytest.raises(SettingError, match=r"VERIFY_TRITON.*holds the package triton"):
        settings.check()
