"""The search for the smallest fault that a single case convicts."""

from __future__ import annotations

import pytest

from tests.faults import own_power
from verify.problem import Problem

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("fault", "seen", "missed"),
    [("out", 3e-2, 1e-9), ("lse", 1e-4, 1e-9), ("dv", 3e-2, 1e-9), ("delta", 1e-2, 1e-9)],
)
def test_large_faults_are_convicted_and_tiny_ones_and_the_right_kernel_are_not(
    fault: str, seen: float, missed: float
) -> None:
    case = Problem.parse("hq=1,hkv=1,sq=12,skv=16,d=16,dtype=bfloat16,seed=1")
    assert not own_power.convicted(case, fault, 0.0)
    assert not own_power.convicted(case, fault, missed)
    assert own_power.convicted(case, fault, seen)
    assert own_power.convicted(case, fault, -seen)


@pytest.mark.parametrize("last", [-1, 0, 3, 17, own_power.GRID * own_power.DECADES])
def test_the_search_finds_the_last_strength_that_fails(last: int) -> None:
    assert own_power._farthest(lambda at: at <= last, -1) == last
    assert own_power._farthest(lambda at: at <= last, last) == last
    assert own_power._farthest(lambda at: at <= last, last + 5) == last + 5


def test_a_class_without_a_conviction_has_no_strength(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_power, "convicted", lambda problem, fault, strength: False)
    assert own_power.smallest(own_power.cases("float16"), "scale") is None
    case = own_power.cases("float16")[0]
    monkeypatch.setattr(
        own_power, "convicted", lambda problem, fault, strength: abs(strength) >= 0.01
    )
    found = own_power.smallest([case], "scale")
    assert found is not None
    assert found == (pytest.approx(0.01), case.distribution)


def test_the_table_has_a_line_for_each_class(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        own_power, "convicted", lambda problem, fault, strength: abs(strength) >= 0.1
    )
    own_power.main(["--dtype", "float32", "--only", "lse", "--only", "dq"])
    assert capsys.readouterr().out.splitlines() == [
        "lse | float32 | 1.0e-01 (normal) | 1.0e-01 (counting)",
        "dq | float32 | 1.0e-01 (normal)",
    ]
