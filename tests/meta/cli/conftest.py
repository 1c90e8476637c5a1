"""What several tests of the command line need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from verify.cell.process import ROOT


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh current directory, from which commands find the sources."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    return tmp_path
