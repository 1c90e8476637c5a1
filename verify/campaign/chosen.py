"""A pytest plugin of every campaign: it judges the chosen dtypes, oracles and shard alone, and
writes down how many of its tests have ended.

It imports nothing heavy until pytest is configured: it is imported before conftest.py has chosen a
worker's GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from verify.campaign import fairness, halt
from verify.campaign.progress import Counted, record
from verify.machine.places import state_directory

_WITHIN_XDIST = "PYTEST_XDIST_WORKER"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that `verify run` passes on."""
    group = parser.getgroup("verify")
    for name, what in (("dtype", "judge this dtype alone"), ("oracle", "ask this oracle alone")):
        group.addoption(f"--only-{name}", action="append", default=[], metavar="NAME", help=what)
    group.addoption("--shard", metavar="I/N", help="judge the I-th of N parts alone")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the oracles, after conftest.py has loaded those of files.  Raises pytest.UsageError
    for a name that is none."""
    from verify import oracles

    names = config.getoption("--only-oracle")
    try:
        oracles.use_only(names)
    except ValueError as error:
        raise pytest.UsageError(f"--oracle: {error}") from None
    if _WITHIN_XDIST not in os.environ and config.getoption("--run-id", None):
        config.pluginmanager.register(_Progress(config.getoption("--run-id")), "verify-progress")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not chosen; order the rest fairly if the campaign's time is limited."""
    dtypes = config.getoption("--only-dtype")
    narrow = bool(dtypes or config.getoption("--only-oracle"))
    out = [item for item in items if narrow and not _wanted(_parameters(item), dtypes)]
    names = {item.nodeid for item in items} - {item.nodeid for item in out}
    shard = config.getoption("--shard")
    if shard is not None:
        number, _, count = shard.partition("/")
        names = in_shard(names, int(number), int(count))
        out = [item for item in items if item.nodeid not in names]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item.nodeid in names]
    if halt.limited():
        workers = getattr(config, "workerinput", {}).get("workercount", 1)
        items[:] = fairness.fair(items, _asked, workers)


def in_shard(names: Iterable[str], number: int, count: int) -> set[str]:
    """Those of a campaign's tests that are in its shard of that number, from 1 to `count`.

    The shards of a count are disjoint, their union is the whole, and their sizes differ by one at
    most.  Neighbours in the order of names ask the same of another dtype or config, and take about
    as long: they are dealt out in turn.
    """
    return set(sorted(names)[number - 1 :: count])


def _parameters(item: pytest.Item) -> Mapping[str, Any]:
    """What an item of a parametrized test gets."""
    found = getattr(getattr(item, "callspec", None), "params", {})
    return found if isinstance(found, Mapping) else {}


def _asked(item: pytest.Item) -> fairness.Asked | None:
    """What a test asks; None for a stored case and a file that does not load, which come first."""
    given = _parameters(item)
    question = item.nodeid.partition("[")[0]
    long = item.get_closest_marker("long") is not None
    if "declaration" in given:
        return fairness.Asked(given["declaration"].ref, "(builds)", question, long)
    targets = [given["target"]] if "target" in given else [*given.get("targets", ())]
    if not targets:
        return None
    group = targets[0].group if "target" in given else ""  # one function can ask several groups
    first = targets[0]
    return fairness.Asked(first.declaration.ref, first.dtype, f"{question} {group}", long)


def _wanted(given: Mapping[str, Any], dtypes: list[str]) -> bool:
    """Whether a test with these parameters is to be asked; a file that does not load is always
    told, and builds are of no dtype and no oracle."""
    from verify.oracles import of_group

    if "unloadable" in given:
        return True
    targets = [given["target"]] if "target" in given else [*given.get("targets", ())]
    targets += [given["witness"][0]] if "witness" in given else []
    return any(
        (not dtypes or target.dtype in dtypes) and bool(of_group(target.group))
        for target in targets
    )


class _Progress:
    """Counts the tests of the session in its first process."""

    def __init__(self, run_id: str) -> None:
        self.directory = Path(state_directory() / "runs" / run_id).absolute()
        self.total = 0
        self.done = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        self._collected(len(ids))

    def _collected(self, count: int) -> None:
        self.total = max(self.total, count)
        self._write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.done += 1
            self._write()

    def _write(self) -> None:
        if self.total and self.directory.is_dir():
            record(self.directory, Counted(self.done, self.total))
