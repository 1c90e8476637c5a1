"""The pytest plugin: `pytest --kernel FILE` judges a kernel file, one test for each property, and
the fixture `verify_check`.

pytest loads this module in every session where the package is installed.  So it imports nothing but
pytest until a kernel is judged, and collects nothing without its option.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# An item for each: the name of a group of oracles, or of a family of groups, and those tests of
# tests/properties/ that ask it.
PROPERTIES = {
    "accuracy": (
        "test_is_within_its_bounds_and_contract",
        "test_fills_its_coverage_bins",
        "test_meets_every_pair_of_levels",
    ),
    "counting": ("test_counts_the_visible_keys",),
    "gather": ("test_gathers_the_right_row",),
    "poison": ("test_ignores_what_is_masked",),
    "exact": ("test_answers_exactly", "test_answers_each_question_once"),
    "relations": ("test_holds_its_relations", "test_holds_each_relation_once"),
    "contract": ("test_keeps_its_contract",),
    "declared_numerics": ("test_computes_as_declared",),
    "lengths": ("test_counts_and_gathers_at_long_lengths",),
    "long": ("test_is_right_over_long_sequences",),
    "refusal": ("test_refuses_what_it_does_not_support",),
    "gradients": (
        "test_gradients_are_within_their_bounds",
        "test_fills_its_coverage_bins",
        "test_meets_every_pair_of_levels",
    ),
    "contract_backward": ("test_backward_keeps_its_contract",),
    "lengths_gradients": ("test_gradients_gather_at_long_lengths",),
    "long_gradients": ("test_gradients_are_right_over_long_sequences",),
    "gradient_refusal": ("test_backward_refuses_what_it_does_not_support",),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; what they hold has names of this plugin's own."""
    group = parser.getgroup("attention-verify")
    group.addoption(
        "--kernel",
        action="append",
        default=[],
        metavar="FILE",
        dest="verify_kernels",
        help="judge this kernel file: one test for each property",
    )
    group.addoption(
        "--kernel-examples",
        type=int,
        default=None,
        metavar="N",
        dest="verify_examples",
        help="random problems per dtype and group of oracles, for --kernel and verify_check",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Collect the kernels, alone if no other argument was given.  Raises pytest.UsageError for a
    file that does not exist, and for a number of examples that is none."""
    files = config.getoption("verify_kernels")
    for name in files:
        if not Path(name).is_file():
            raise pytest.UsageError(f"--kernel: no such file: {name}")
    examples = config.getoption("verify_examples")
    if examples is not None and examples < 1:
        raise pytest.UsageError(f"--kernel-examples: {examples} is not a number above 0")
    if not files:
        return
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []
    config.args += [name for name in files if name not in config.args]


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Collector | None:
    """A kernel file is not imported as a test module."""
    files = parent.config.getoption("verify_kernels")
    if module_path.resolve() not in [Path(name).resolve() for name in files]:
        return None
    return KernelFile.from_parent(parent, path=module_path)


class KernelFile(pytest.File):
    """A kernel file, with an item for each property."""

    concluded: Conclusion | None = None

    def collect(self) -> Iterator[pytest.Item]:
        for name in PROPERTIES:
            yield PropertyItem.from_parent(self, name=name)


@dataclass(frozen=True)
class Conclusion:
    """What a campaign has found.  failures: explanations by property; judged: properties with a
    verdict; trouble: why nothing is known of the others, or ""."""

    failures: dict[str, list[str]]
    judged: frozenset[str]
    trouble: str = ""


class Wrong(Exception):  # noqa: N818 - a verdict
    """A failing verdict, explained."""


class PropertyItem(pytest.Item):
    """One property of one kernel.  The first one of a file that runs judges all that are selected,
    in one campaign; under pytest-xdist each judges itself."""

    def runtest(self) -> None:
        file = self.parent
        assert isinstance(file, KernelFile)
        within_xdist = "PYTEST_XDIST_WORKER" in os.environ
        if within_xdist or file.concluded is None:
            mine = [each.name for each in self.session.items if each.parent is file]
            file.concluded = _judged(
                self.path,
                [self.name] if within_xdist else mine,
                self.config.getoption("verify_examples"),
            )
        found = file.concluded
        if found.failures.get(self.name):
            raise Wrong("\n\n".join(found.failures[self.name]))
        if found.trouble:
            raise Wrong(found.trouble)
        if self.name not in found.judged:
            pytest.skip("no oracle of this property can judge this kernel here")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The explanation without a traceback, which would show this plugin."""
        if isinstance(excinfo.value, Wrong):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, f"{self.path.name}: {self.name}"


def _judged(kernel: Path, names: list[str], examples: int | None) -> Conclusion:
    """Judge these properties of a kernel file in one campaign."""
    from verify.campaign.runner import CLEAN, FAILED, RunnerError, evidence_of
    from verify.door.checking import campaign, request_of
    from verify.evidence.explanation import explain, smallest
    from verify.evidence.known_failures import xfails_in
    from verify.machine.defaults import defaults
    from verify.oracles import groups

    tests = dict.fromkeys(test for name in names for test in PROPERTIES[name])
    select = "" if len(names) == len(PROPERTIES) else " or ".join(tests)
    file = Path(os.path.relpath(kernel))
    request = request_of(file, defaults(), examples=examples, select=select)
    try:
        status, printed = campaign(request, None)
    except RunnerError as error:
        nothing = str(error).startswith("-k: ")  # of the selected properties none can be asked
        return Conclusion({}, frozenset(), "" if nothing else str(error))
    evidence = evidence_of(request)
    known = groups()

    def named(group: str) -> str:
        name = (known[group].family or group) if group in known else ""
        return name if name in PROPERTIES else names[0]

    failures: dict[str, list[str]] = {}
    groups_of: set[str] = set()
    if evidence is not None:
        for verdict in smallest(xfails_in(evidence).unexpected(evidence.verdicts)):
            failures.setdefault(named(verdict.group), []).append(explain(verdict))
        groups_of = {table.shape.group for table in evidence.verdicts.counted.tables}
    trouble = "" if status in (CLEAN, FAILED) else f"nothing is known of {kernel}: {printed}"
    judged = frozenset(map(named, groups_of))
    return Conclusion(failures, judged, trouble)


@pytest.fixture
def verify_check(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Callable[..., Any]:
    """`verify.check`, with --kernel-examples by default, and its report among JUnit's
    properties."""
    examples = request.config.getoption("verify_examples")

    def check(kernel: Any, **choices: Any) -> Any:
        __tracebackhide__ = True
        import verify

        if examples is not None:
            choices.setdefault("examples", examples)
        report = verify.check(kernel, **choices)
        record_property("verify", str(report))
        return report

    return check
