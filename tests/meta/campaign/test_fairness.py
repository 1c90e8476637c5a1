"""A campaign whose time is limited asks all variants and dtypes about as much, whenever it ends."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.campaign import chosen, halt
from verify.campaign.fairness import Asked, fair, in_turns

DTYPES = ("float16", "bfloat16", "float32")
QUESTIONS = ("accuracy", "counting", "poison", "exact", "relations", "refusal", "gradients")
LONG = ("long", "lengths")


def campaign(variants: int, configs: int = 1) -> list[Asked]:
    """The tests of a campaign, in pytest's order."""
    return [
        Asked(f"v{variant}", dtype, question, question in LONG)
        for question in (*QUESTIONS[:3], *LONG, *QUESTIONS[3:])
        for variant in range(variants)
        for dtype in DTYPES[: 1 + variant % 3]
        for _ in range(configs)
    ]


def pair(test: Asked) -> tuple[str, str]:
    return test.variant, test.dtype


def known(test: Asked | str) -> Asked | None:
    return test if isinstance(test, Asked) else None


@given(st.integers(1, 7), st.integers(1, 3), st.data())
def test_whenever_it_ends_all_have_been_asked_as_much(
    variants: int, configs: int, data: st.DataObject
) -> None:
    tests = campaign(variants, configs)
    order = fair(tests, known, 1)
    assert Counter(order) == Counter(tests), "nothing is left out or doubled"
    end = data.draw(st.integers(0, len(order)))
    asked = Counter(map(pair, order[:end]))
    counts = [asked[each] for each in set(map(pair, tests))]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("variants", [3, 4, 9])
def test_the_first_round_asks_every_variant_before_any_twice_and_several_questions(
    variants: int,
) -> None:
    tests = campaign(variants)
    order = fair(tests, known, 1)
    assert len({test.variant for test in order[:variants]}) == variants
    assert len({test.dtype for test in order[:variants]}) > 1
    once = order[: len(set(map(pair, tests)))]
    short = [test.question for test in once]
    assert len(set(short)) == min(len(once), len(QUESTIONS))
    counts = Counter(short).values()
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_workers_follow_one_fair_order_together(workers: int) -> None:
    tests = campaign(5)
    order = fair(tests, known, workers)
    # As xdist cuts them: `WorkStealingScheduling.schedule`.
    parts: list[list[Asked]] = []
    rest = order
    for left in range(workers, 0, -1):
        size = len(rest) // left
        parts.append(rest[:size])
        rest = rest[size:]
    together = in_turns(parts[::-1])
    assert together == fair(tests, known, 1)
    workers_of = Counter(each for part in parts for each in set(map(pair, part)))
    assert min(workers_of.values()) >= min(workers, 2), (
        "no worker's speed alone decides what a variant and dtype gets"
    )


def test_long_tests_are_not_the_last() -> None:
    order = fair(campaign(6), known, 1)
    last = max(n for n, test in enumerate(order) if test.long)
    assert last < len(order) * 0.7
    only = [Asked("v", "float16", f"long {n}", True) for n in range(3)]
    assert fair(only, known, 1) == only
    many = [*only, Asked("v", "float16", "a"), Asked("v", "float16", "b")]
    assert fair(many, known, 1)[-1].question == "b"


def test_stored_cases_and_files_that_do_not_load_come_first() -> None:
    tests = [*campaign(2), "a stored case", "a file"]
    assert fair(tests, known, 1)[:2] == ["a stored case", "a file"]
    assert fair([], known, 3) == []


def _items(limited: bool, monkeypatch: pytest.MonkeyPatch, shard: str | None = None) -> list[Any]:
    """Tests of two dtypes, after the plugin has ordered them."""
    monkeypatch.delenv(halt.UNTIL, raising=False)
    if limited:
        monkeypatch.setenv(halt.UNTIL, "1e9")
    declaration = SimpleNamespace(ref="v")
    items: list[Any] = []
    for name in ("test_a", "test_b", "test_c"):
        for dtype in DTYPES[:2]:
            target = SimpleNamespace(declaration=declaration, dtype=dtype, group=name)
            items.append(item(f"{name}[{dtype}]", target=target))
            if name == "test_b":
                items.append(item(f"test_family[{dtype}]", targets=(target,)))
    items.append(item("test_compiles[v]", declaration=declaration, arch="sm_90a"))
    items.append(item("test_holds[case]", witness=("target", "case")))
    options = {"--only-dtype": [], "--only-oracle": [], "--shard": shard}
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    config: Any = SimpleNamespace(getoption=options.__getitem__, hook=hook)
    chosen.pytest_collection_modifyitems(config, items)
    return [each.nodeid for each in items]


def item(name: str, **params: object) -> SimpleNamespace:
    return SimpleNamespace(
        nodeid=name, callspec=SimpleNamespace(params=params), get_closest_marker=lambda _: None
    )


def test_the_plugin_orders_a_campaign_with_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _items(False, monkeypatch)
    assert before[:2] == ["test_a[float16]", "test_a[bfloat16]"], "as pytest has collected them"
    order = _items(True, monkeypatch)
    assert sorted(order) == sorted(before)
    assert order[0] == "test_holds[case]"
    begun = [name.partition("[")[2] for name in order[1:4]]
    assert sorted(begun) == ["bfloat16]", "float16]", "v]"]
    assert len({name.partition("[")[0] for name in order[1:4]}) == 3
    assert _items(True, monkeypatch) == order


def test_shards_stay_disjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [_items(True, monkeypatch, f"{n}/2") for n in (1, 2)]
    assert sorted(chain(*parts)) == sorted(_items(True, monkeypatch))
