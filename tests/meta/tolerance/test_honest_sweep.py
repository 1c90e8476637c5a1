"""The sweep over honest elements: it goes on where it stopped, and refuses what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests import honest_sweep
from tests.harness.honest_backwards import HALF
from tests.harness.ordered_forwards import HONEST as ORDERED

pytestmark = pytest.mark.usefixtures("one_thread")
ASCENDING = "forward: ascending, sm_90, bfloat16"


def test_a_sweep_goes_on_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(tmp_path / "journal"), "--only", ASCENDING, "--elements", "1000"]
    assert honest_sweep.main(words) == 0
    lines = (tmp_path / "journal").read_text().splitlines()
    assert len(lines) == 1  # one climb has more
    assert json.loads(lines[0])["declared"] == ASCENDING
    said = capsys.readouterr().out
    assert "0 refused; 2 of 2 pairs of a tensor and a declaration have 1,000" in said
    words[-1] = "50000"
    assert honest_sweep.main(words) == 0
    assert len((tmp_path / "journal").read_text().splitlines()) == 2
    assert honest_sweep.main([*words[:3], "--show", "--share", "1/2"]) == 0
    assert honest_sweep.main([*words[:3], "--show"]) == 0
    assert "0 of 2 pairs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        (ASCENDING, ORDERED[0].but(fault="O truncated")),
        ("backward: one accumulator, sm_90, bfloat16", HALF.but(fault="P truncated")),
    ],
)
def test_what_is_wrong_is_refused(name: str, wrong: object) -> None:
    right = honest_sweep.declared()[name]
    assert not any(honest_sweep.climb(right, 1).refused.values())
    planted = replace(right, kernel=wrong)
    assert any(honest_sweep.climb(planted, 1).refused.values())


def test_every_declaration_has_its_own_name_and_problems() -> None:
    found = honest_sweep.declared()
    assert len(found) > 200
    for number, (name, one) in enumerate(found.items()):
        assert one.name == name
        problem = one.problem(number)
        assert problem.dtype == one.dtype
        assert problem.heads_kv > 1
