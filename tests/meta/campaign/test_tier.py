"""The first tier of the suite: what it keeps, who runs all, and that it is said."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.properties import tier
from verify.campaign.targets import Target

ARGS, TESTPATHS = pytest.Config.ArgsSource.ARGS, pytest.Config.ArgsSource.TESTPATHS
NOTHING = {
    "thorough": False,
    "keyword": "",
    "markexpr": "",
    "kernel": [],
    "all_configs": False,
}


@pytest.fixture
def collected(pytestconfig: pytest.Config) -> list[pytest.Item]:
    """All tests of this session, of the complete suite where it runs without a path."""
    return pytestconfig.stash[tier.COLLECTED]


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


@pytest.mark.parametrize("profile", tier.REDUCED)
def test_every_file_keeps_tests(collected: list[pytest.Item], profile: str) -> None:
    out = set(tier.left_out(collected, profile))
    kept = {file_of(item) for item in collected if item not in out}
    asked = [item for item in collected if profile == "ci" or not item.get_closest_marker("for_ci")]
    assert kept == {file_of(item) for item in asked}


def test_every_function_keeps_a_test_unless_all_of_it_is_marked(
    collected: list[pytest.Item],
) -> None:
    out = set(tier.left_out(collected))
    kept = {function_of(item) for item in collected if item not in out}
    for item in collected:
        marked = [mark.name for mark in item.iter_markers("thorough")]
        assert function_of(item) in kept or marked, item.nodeid


@pytest.mark.parametrize("profile", tier.REDUCED)
def test_every_variant_group_and_dtype_keeps_a_judged_case(
    collected: list[pytest.Item], profile: str
) -> None:
    out = set(tier.left_out(collected, profile))

    def seen(items: list[pytest.Item]) -> dict[str, set[object]]:
        targets = [
            target
            for item in items
            for value in getattr(item, "callspec", SimpleNamespace(params={})).params.values()
            for target in (value if isinstance(value, tuple) else (value,))
            if isinstance(target, Target)
        ]
        return {
            "variant": {target.declaration.ref for target in targets},
            "dtype": {(target.declaration.ref, target.dtype) for target in targets},
            "group": {target.group for target in targets},
        }

    assert seen([item for item in collected if item not in out]) == seen(collected)


def fault_of(item: pytest.Item) -> object:
    """What a test plants: the value of a parameter with such a name."""
    parameters = getattr(item, "callspec", SimpleNamespace(params={})).params
    return next((parameters[name] for name in ("fault", "slip") if name in parameters), None)


def test_ci_plants_every_fault(collected: list[pytest.Item]) -> None:
    out = set(tier.left_out(collected, "ci"))

    def planted(items: list[pytest.Item]) -> set[tuple[str, str]]:
        return {(function_of(item), repr(fault_of(item))) for item in items}

    assert planted([item for item in collected if item not in out]) >= {
        pair for pair in planted(collected) if pair[1] != "None"
    }


@pytest.mark.parametrize(
    ("profile", "source", "given", "expected"),
    [
        ("dev", TESTPATHS, {}, True),
        ("ci", TESTPATHS, {}, True),
        ("ci", TESTPATHS, {"thorough": True}, False),
        ("gpu", TESTPATHS, {}, False),
        ("nightly", TESTPATHS, {}, False),
        ("dev", ARGS, {}, False),
        ("dev", TESTPATHS, {"thorough": True}, False),
        ("dev", TESTPATHS, {"keyword": "masks"}, False),
        ("dev", TESTPATHS, {"markexpr": "thorough"}, False),
        ("dev", TESTPATHS, {"kernel": ["mine.py"]}, False),
        ("dev", TESTPATHS, {"all_configs": True}, False),
    ],
)
def test_only_the_whole_suite_with_nothing_chosen_is_reduced(
    profile: str, source: object, given: dict[str, object], expected: bool
) -> None:
    config = SimpleNamespace(option=SimpleNamespace(**NOTHING | given), args_source=source)
    assert tier.is_reduced(cast(pytest.Config, config), profile) is expected


class Config:
    """What the plugin asks of pytest's."""

    def __init__(self, told: bool) -> None:
        self.stash = pytest.Stash()
        self.workerinput = {"verify_tier": told}
        self.workeroutput: dict[str, int] = {}
        self.dropped: list[object] = []
        self.hook = SimpleNamespace(pytest_deselected=self.drop)

    def drop(self, items: list[object]) -> None:
        self.dropped.extend(items)

    def getoption(self, name: str) -> str:
        return "dev"


def items(*marked: str) -> list[Any]:
    """Tests with one mark each; "" for none."""

    def closest(mark: str) -> Callable[[str], object]:
        return lambda name: getattr(pytest.mark, mark).mark if mark and name == mark else None

    return [SimpleNamespace(get_closest_marker=closest(one), nodeid=one) for one in marked]


class Item(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


@pytest.mark.parametrize("reduced", [True, False])
def test_what_is_left_out_is_counted_by_a_worker_and_said_by_the_first_process(
    reduced: bool,
) -> None:
    worker = Config(told=reduced)
    tier.pytest_configure(cast(Any, worker))
    tests = [Item(**vars(item)) for item in items("thorough", "", "for_ci")]
    left = list(tests)
    tier.pytest_collection_modifyitems(cast(Any, worker), left)
    assert left == ([tests[1]] if reduced else tests)
    assert worker.dropped == ([tests[0], tests[2]] if reduced else [])

    first = Config(told=reduced)
    tier.pytest_testnodedown(SimpleNamespace(workeroutput=worker.workeroutput, config=first))
    lines: list[str] = []
    reporter = SimpleNamespace(write_line=lines.append)
    tier.pytest_terminal_summary(cast(Any, reporter), cast(Any, first))
    assert lines == ([tier.said(2)] if reduced else [])
    assert "2 tests" in tier.said(2)
    assert tier.COMMAND in tier.said(2)


def test_ci_runs_what_is_for_ci_and_a_first_look_does_not() -> None:
    tests = [Item(**vars(item)) for item in items("thorough", "", "for_ci")]
    assert tier.left_out(tests, "ci") == [tests[0]]
    assert tier.left_out(tests, "dev") == [tests[0], tests[2]]


def test_a_first_look_runs_some_tests_of_a_function_and_ci_all() -> None:
    mark = pytest.mark.first_look(2).mark

    def marked(name: str) -> Any:
        return Item(get_closest_marker={"first_look": mark}.get, nodeid=name)

    tests = [marked(f"one[{n}]") for n in range(7)] + [marked("other[0]"), marked("other[1]")]
    assert tier.left_out(tests, "ci") == []
    out = tier.left_out(tests, "dev")
    assert len(out) == 5
    assert set(out) < set(tests[:7])


@pytest.mark.parametrize(("count", "most"), [(1, 1), (2, 5), (5, 5), (7, 3), (26, 4)])
def test_chosen_places_are_as_many_as_asked_and_lie_evenly(count: int, most: int) -> None:
    choices = [sorted(tier.spread(count, most, turn)) for turn in range(count)]
    for places in choices:
        assert len(places) == min(count, most)
        gaps = [b - a for a, b in zip(places, [*places[1:], places[0] + count], strict=True)]
        assert max(gaps) - min(gaps) <= 1
    assert {place for places in choices for place in places} == set(range(count))


def test_a_choice_shows_every_kind_and_turns() -> None:
    kinds = [frozenset(pair) for pair in ("ax", "ay", "bx", "by", "ax", "c")]
    for turn in range(4):
        kept = tier.representatives(kinds, turn)
        assert set().union(*(kinds[n] for n in kept)) == set("abcxy")
        assert len(kept) < len(kinds)
    same = [frozenset("a")] * 3
    assert [tier.representatives(same, turn) for turn in range(3)] == [{0}, {1}, {2}]


def test_kinds_of_a_problem_are_its_masks_kind_and_its_features() -> None:
    kinds = tier.features("shape", of="build")({"shape": "sq=3,mask=window.2.1", "build": "d32"})
    assert set(kinds) == {"sq", "mask=window", "build: d32"}


def test_of_marked_values_the_first_are_kept() -> None:
    marked = tier.thorough([1, 2, 3], keep=2)
    assert marked[:2] == [1, 2]
    (further,) = marked[2:]
    assert [mark.name for mark in cast(Any, further).marks] == ["thorough"]
