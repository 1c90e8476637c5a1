"""Fixtures of the tests of cells."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from verify.cell.arena import Arena


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena()
    yield arena
    arena.close()
