"""`verify.check` takes what the project's pyproject.toml says where the call says nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import verify
from verify.campaign.runner import RunRequest
from verify.door import checking

TABLE = "[tool.verify]\nexamples = 3\ntime = 60\nprofile = 'ci'\nseed = 5\nworkers = 1\n"


def test_the_call_has_precedence_over_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[RunRequest, float | None]] = []

    def campaign(request: RunRequest, deadline: float | None) -> tuple[int, str]:
        asked.append((request, deadline))
        return checking.CLEAN, ""

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(checking, "campaign", campaign)
    for table, arguments in (("", {}), (TABLE, {}), (TABLE, {"examples": 8, "seed": 0})):
        (tmp_path / "pyproject.toml").write_text(table, encoding="utf-8")
        with pytest.raises(RuntimeError, match="nothing is known"):
            verify.check(tmp_path / "mine.py", **arguments)  # type: ignore[arg-type]
    made = [(r.examples, r.profile, r.seed, r.workers) for r, _ in asked]
    assert made == [(10, None, None, "auto"), (3, "ci", 5, "1"), (8, "ci", 0, "1")]
    assert all(request.quiet for request, _ in asked)
    deadlines = [None if until is None else until - time.monotonic() for _, until in asked]
    assert deadlines[0] is None
    assert deadlines[1] == pytest.approx(60, abs=5)
    (tmp_path / "pyproject.toml").write_text("[tool.verify]\nexample = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"verify\.example: no such key; there are"):
        verify.check(tmp_path / "mine.py")
