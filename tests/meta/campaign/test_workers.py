"""Each worker gets one of the visible GPUs, and workers begin with the longest tests."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

import conftest
from verify.machine import device
from verify.machine.dealing import dealt

_TWO = "0, GPU-aa, NVIDIA H100, 9.0, 580\n1, GPU-bb, NVIDIA H100, 9.0, 580\n"
_UNLIKE = "0, GPU-aa, NVIDIA A100, 8.0, 580\n1, GPU-bb, NVIDIA H100, 9.0, 580\n"
_ONE = "0, GPU-aa, NVIDIA H100, 9.0, 580\n"


@pytest.mark.parametrize(
    ("machine", "mask", "worker", "seen"),
    [
        (_TWO, None, "gw0", "GPU-aa,GPU-bb"),
        (_TWO, None, "gw3", "GPU-bb,GPU-aa"),
        (_TWO, "1,0", "gw0", "GPU-bb,GPU-aa"),
        (_TWO, "1,0", "gw1", "GPU-aa,GPU-bb"),
        (_TWO, "GPU-b,GPU-a", "gw1", "GPU-aa,GPU-bb"),
        (_TWO, "MIG-x,MIG-y", "gw1", "MIG-y,MIG-x"),
        (_TWO, "1,0,-1,1", "gw2", "GPU-bb,GPU-aa"),  # CUDA stops at -1
        (_TWO, "1,7,0", "gw1", "1,7,0"),  # and sees one GPU here
        (_UNLIKE, "1,0", "gw1", "0,1"),  # whose numbers CUDA can give otherwise
        (None, "1,0", "gw1", "0,1"),
        (_TWO, "1", "gw1", "1"),
        (_TWO, "", "gw1", ""),
        (_TWO, None, "", None),
        (_ONE, None, "gw1", None),
        (None, None, "gw1", None),
    ],
)
def test_each_worker_has_one_of_its_own_first(
    monkeypatch: pytest.MonkeyPatch,
    machine: str | None,
    mask: str | None,
    worker: str,
    seen: str | None,
) -> None:
    monkeypatch.setattr(device, "_output", lambda command: machine)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "to be restored")
        del os.environ["CUDA_VISIBLE_DEVICES"]
    conftest._pin_gpu(worker)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == seen


@pytest.mark.parametrize("most", [0, 1])
def test_a_campaign_that_stops_at_a_failure_begins_with_quick_tests(most: int) -> None:
    def item(name: str, seconds: float) -> SimpleNamespace:
        marker = SimpleNamespace(args=(seconds,)) if seconds else None
        return SimpleNamespace(name=name, get_closest_marker=lambda _: marker)

    items = [item("quick", 0), item("other", 0), item("long", 30)]
    config = SimpleNamespace(getoption=lambda _: most, workerinput={"workercount": 2})
    conftest.pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
    assert next(each.name for each in items) == ("quick" if most else "long")


@pytest.mark.parametrize(("examples", "first"), [(12, "quick"), (200, "draws")])
def test_a_test_that_draws_much_is_a_long_one(
    examples: int, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def item(name: str) -> SimpleNamespace:
        draws = SimpleNamespace(is_hypothesis_test=name == "draws")
        return SimpleNamespace(name=name, obj=draws, get_closest_marker=lambda _: None)

    profile = SimpleNamespace(max_examples=examples)
    monkeypatch.setattr("verify.campaign.durations.settings", lambda: profile)
    items = [item("quick"), item("draws")]
    config = SimpleNamespace(getoption=lambda _: 0, workerinput={"workercount": 2})
    conftest.pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
    assert items[0].name == first


def test_long_tests_of_one_variant_go_to_one_worker_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def item(ref: str, dtype: str) -> SimpleNamespace:
        target = SimpleNamespace(declaration=SimpleNamespace(ref=ref))
        return SimpleNamespace(
            name=f"{ref}-{dtype}",
            nodeid=f"bounds[{ref}-{dtype}]",
            callspec=SimpleNamespace(params={"target": target}),
            get_closest_marker=lambda _: SimpleNamespace(args=(40,)),
        )

    config = SimpleNamespace(getoption=lambda _: 0, workerinput={"workercount": 2})
    for kind, first in (("cpu", ["a-f", "a-b"]), ("cuda", ["a-f", "b-f"])):
        monkeypatch.setattr("verify.machine.device.fingerprint", lambda kind=kind: {"kind": kind})
        items = [item("a", "f"), item("a", "b"), item("b", "f"), item("b", "b")]
        conftest.pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
        assert [each.name for each in items[:2]] == first


def test_every_worker_begins_with_long_tests() -> None:
    items = ["a", "b", "l10", "c", "l30", "d", "l20", "e"]
    order = dealt(items, lambda name: float(name[1:] or 0), 2)
    assert order == ["l30", "a", "b", "c", "l20", "l10", "d", "e"]
    assert dealt(items, lambda name: float(name[1:] or 0), 1) == items


def test_a_worker_with_a_very_long_test_gets_no_other_one() -> None:
    items = ["l50", *(f"l{5 + n}" for n in range(5)), *"abcdef"]
    order = dealt(items, lambda name: float(name[1:] or 0), 2)
    assert order == ["l50", *"abcde", "l9", "l8", "l7", "l6", "l5", "f"]


def test_long_tests_that_share_their_draws_go_to_one_worker() -> None:
    """Each worker would draw them again."""
    items = ["p1", "p2", "p3", "q1", "r1", "r2", "a", "b"]
    order = dealt(items, lambda name: float(len(name) - 1), 2, lambda name: name[0])
    assert order == ["p1", "p2", "p3", "a", "r1", "r2", "q1", "b"]
