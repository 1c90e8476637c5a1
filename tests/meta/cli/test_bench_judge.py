"""What `verify bench suite` says of the judge's own speed, on small problems."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verify.cell import discovery
from verify.cell.process import ROOT
from verify.cli import bench_judge
from verify.cli.bench_judge import BOUNDED, LONG, lines

FLASH = "flash.py" if discovery.environment().device == "cuda" else "cpu_flash.py"
WRONG = ROOT / "tests" / "sample_kernels" / "wrong_scale.py"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, square, size in (("BOUNDED", BOUNDED, (65, 130)), ("LONG", LONG, (7, 40_000))):
        monkeypatch.setattr(bench_judge, name, replace(square, on_gpu=size, on_cpu=size))


def test_bounds_are_told_beside_the_reference_and_a_long_sequence_by_its_seconds() -> None:
    bounds, long = lines(discovery.roster([ROOT / "kernels" / "torch" / FLASH]).declarations)
    assert bounds.startswith("bounds, 65 rows and 130 keys, head_dim 128: ")
    share = float(bounds.split(": ")[1].split()[0])
    low, high = map(float, bounds.removesuffix(")").split("median of 5, ")[1].split(" to "))
    assert 0 < low <= share <= high
    assert long.startswith("rows and invariants, 7 rows and 40,000 keys, head_dim 64: ")


def test_a_kernel_that_fails_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    declarations = discovery.roster([WRONG]).declarations
    monkeypatch.setattr(bench_judge, "_VARIANTS", (declarations[0].ref,))
    with pytest.raises(RuntimeError, match=r"wrong_scale.*fails: verify run"):
        list(lines(declarations))


def test_without_a_fast_kernel_nothing_is_said() -> None:
    assert list(lines(discovery.roster([WRONG]).declarations)) == []
