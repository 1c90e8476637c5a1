"""The rates of the reference by its tiles and the costs of bounds, as the harness prints them."""

from __future__ import annotations

import re

import pytest

from tests.harness import truth_speed


def test_it_prints_a_rate_for_each_tile_and_the_costliest_operations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert truth_speed.main(["64", "48"]) == 0
    text = capsys.readouterr().out
    rates = re.findall(r"(fp64 product|tiles of \w+ rows, \w+ keys): ([\d.]+) TFLOP/s", text)
    assert len(rates) == 1 + len(truth_speed.TILES)
    steps = dict(re.findall(r"(?m)^(reference|bound): ([\d.]+) ms$", text))
    assert float(steps["reference"]) > 0
    assert float(steps["bound"]) > 0
    assert "aten::bmm" in text
