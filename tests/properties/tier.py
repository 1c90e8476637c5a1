"""The first tier of the suite, and the rest: the markers `thorough`, `for_ci` and `first_look`.

`verify test` without a path runs the first tier: of tests that ask the same question of another
dtype, config, shape or architecture, one of each kind.  The profile `dev`, a person's first look,
also leaves out the tests with the mark `for_ci`, and most of those with the mark `first_look`; CI
runs both.  `--thorough` runs all; so do the profiles of nightly runs and GPUs, and a command that
names tests (a path, -k, -m, --kernel).  The closing summary counts what is left out.

A test belongs to the thorough tier by its mark (`thorough(values, keep=2)` marks parameters), or
because its function has the marker `first_tier` and others of its parameters represent its kind.
`for_ci` is for a test that takes seconds and gives the same result on every machine: a fault that
is planted into a kernel whose right form is judged in the first look, or a build for a GPU that is
not there.  `first_look(n)` is for a function with many parameters that ask alike of one machine: a
first look runs n of its tests, spread evenly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import TypeVar
from zlib import crc32

import pytest

COMMAND = "verify test --thorough"
REDUCED = ("dev", "ci")  # the profiles that leave tests out
_T = TypeVar("_T")
_Kinds = Callable[[Mapping[str, object]], Iterable[Hashable]]

COLLECTED: pytest.StashKey[list[pytest.Item]] = pytest.StashKey()  # the first tier and the rest
_LEFT_OUT: pytest.StashKey[int] = pytest.StashKey()


def thorough(values: Iterable[_T], *, keep: int = 1) -> list[object]:
    """Parameters: the first `keep` values as they are, the others of the thorough tier."""
    return _marked(values, keep, pytest.mark.thorough)


def for_ci(values: Iterable[_T], *, keep: int = 1) -> list[object]:
    """Parameters: the first `keep` values as they are, the others for CI."""
    return _marked(values, keep, pytest.mark.for_ci)


def _marked(values: Iterable[_T], keep: int, mark: pytest.MarkDecorator) -> list[object]:
    return [
        value if n < keep else pytest.param(value, marks=mark) for n, value in enumerate(values)
    ]


def first_tier(*kinds: _Kinds | str) -> pytest.MarkDecorator:
    """Keep, in the first tier, as many of a function's tests as show every kind.

    kinds: names of parameters, whose every value is a kind, or functions from a test's parameters
    to its kinds.  Without any, one test is kept.
    """
    return pytest.mark.first_tier.with_args(*kinds)  # a call would decorate a function


def variant(parameters: Mapping[str, object]) -> list[Hashable]:
    """The variant on trial."""
    return [_declaration(parameters).ref]


def variant_and_dtype(parameters: Mapping[str, object]) -> list[Hashable]:
    """The variant on trial and the dtype, of whatever config."""
    return [(_declaration(parameters).ref, _target(parameters).dtype)]


def source_file(parameters: Mapping[str, object]) -> list[Hashable]:
    """The kernel's file: its variants are the same source in other ways."""
    return [_declaration(parameters).path]


def toolchain(parameters: Mapping[str, object]) -> list[Hashable]:
    """What compiles the kernel, which the folder of its file says."""
    return [PurePath(_declaration(parameters).path).parent]


def features(name: str, of: str = "") -> _Kinds:
    """The kinds of a problem given as text in the parameter `name`: its mask's kind and which
    further features it names, not their values; by each value of the parameter `of` as a whole."""

    def kinds(parameters: Mapping[str, object]) -> list[Hashable]:
        words = [word.partition("=") for word in str(parameters[name]).split(",")]
        found = [
            f"{key}={value.split('.')[0]}" if key == "mask" else key for key, _, value in words
        ]
        return [*found, *([f"{of}: {parameters[of]}"] if of else [])]

    return kinds


def left_out(items: Sequence[pytest.Item], profile: str = "ci") -> list[pytest.Item]:
    """The items that a whole run in this profile, one of REDUCED, leaves out."""
    marks = ("thorough", "for_ci") if profile == "dev" else ("thorough",)
    found = [item for item in items if any(map(item.get_closest_marker, marks))]
    of_kinds = [item for item in items if hasattr(item, "callspec")]
    for name, tests in _marked_functions(of_kinds, "first_tier").items():
        kinds = [_kinds(item) for item in tests]
        kept = representatives(kinds, crc32(name.encode()))
        found += [item for n, item in enumerate(tests) if n not in kept]
    if profile == "dev":
        out = set(found)
        left = [item for item in items if item not in out]
        for name, tests in _marked_functions(left, "first_look").items():
            (most,) = tests[0].get_closest_marker("first_look").args  # type: ignore[union-attr]
            kept = spread(len(tests), most, crc32(name.encode()))
            found += [item for n, item in enumerate(tests) if n not in kept]
    return list(dict.fromkeys(found))


def _marked_functions(items: Sequence[pytest.Item], mark: str) -> dict[str, list[pytest.Item]]:
    """The items with a mark, by their function."""
    functions: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker(mark) is not None:
            functions[item.nodeid.partition("[")[0]].append(item)
    return functions


def spread(count: int, most: int, turn: int) -> set[int]:
    """`most` of the places 0 to count - 1, or all if they are fewer, evenly; `turn` says where the
    first lies."""
    if count <= most:
        return set(range(count))
    return {(turn + n * count // most) % count for n in range(most)}


def representatives(kinds: Sequence[frozenset[Hashable]], turn: int) -> set[int]:
    """The places of a choice among tests with these kinds in which every kind occurs.

    Of tests with the same kinds, `turn` chooses: another function's keep another dtype.
    """
    alike: defaultdict[frozenset[Hashable], list[int]] = defaultdict(list)
    for n, each in enumerate(kinds):
        alike[each].append(n)
    order = [places[turn % len(places)] for places in alike.values()]
    seen: set[Hashable] = set()
    kept = set()
    for n in sorted(order, key=lambda n: -len(kinds[n])):
        if kinds[n] - seen or not kept:
            kept.add(n)
            seen |= kinds[n]
    return kept


def _kinds(item: pytest.Item) -> frozenset[Hashable]:
    mark = item.get_closest_marker("first_tier")
    parameters: Mapping[str, object] = item.callspec.params  # type: ignore[attr-defined]
    found: list[Hashable] = []
    for kind in () if mark is None else mark.args:
        if callable(kind):
            found += kind(parameters)
        else:
            found.append(f"{kind}: {parameters[kind]}")
    return frozenset(found)


def _target(parameters: Mapping[str, object]) -> object:
    return parameters["target"] if "target" in parameters else parameters["targets"][0]


def _declaration(parameters: Mapping[str, object]) -> object:
    if "declaration" in parameters:
        return parameters["declaration"]
    return _target(parameters).declaration


def is_reduced(config: pytest.Config, profile: str) -> bool:
    """Whether this session runs the first tier alone: the whole suite, in a profile that is for
    a first look, with nothing chosen by hand."""
    option = config.option
    chosen = option.thorough or option.keyword or option.markexpr or option.kernel
    return (
        profile in REDUCED
        and config.args_source is pytest.Config.ArgsSource.TESTPATHS
        and not (chosen or option.all_configs)
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --thorough."""
    parser.getgroup("verify").addoption(
        "--thorough",
        action="store_true",
        help="run all tests of the suite, not one of each kind",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Decide which tests this session runs; xdist's workers are told."""
    from verify.campaign.run import default_profile

    told = getattr(config, "workerinput", {}).get("verify_tier")
    profile = config.getoption("--profile") or default_profile()
    reduced = is_reduced(config, profile) if told is None else told
    config.stash[_REDUCED] = profile if reduced else ""


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:
    """Tell a worker, which sees other arguments, what was decided."""
    node.workerinput["verify_tier"] = bool(node.config.stash[_REDUCED])  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is of no first look, before the rest is dealt to the workers."""
    config.stash[COLLECTED] = list(items)
    profile = config.stash[_REDUCED]
    if not profile:
        return
    out = set(left_out(items, profile))
    if out:
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]
    config.stash[_LEFT_OUT] = len(out)
    if hasattr(config, "workeroutput"):
        config.workeroutput["verify_tier"] = len(out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Take over a worker's count; all have collected the same."""
    found = getattr(node, "workeroutput", {}).get("verify_tier")
    if found is not None:
        node.config.stash[_LEFT_OUT] = found  # type: ignore[attr-defined]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say how many tests were left out, and how to run them."""
    count = config.stash.get(_LEFT_OUT, 0)
    if count:
        terminalreporter.write_line(said(count))


def said(count: int) -> str:
    """That line."""
    return (
        f"first tier: {count} tests (further dtypes, configs, shapes and architectures; what is for"
        f" CI) were not run; {COMMAND} runs all"
    )


# The profile that leaves tests out in this session; "" if none are left out
_REDUCED: pytest.StashKey[str] = pytest.StashKey()
