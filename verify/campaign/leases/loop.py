"""A pytest plugin: a session that runs the tests it is told to, one lease after another.

The session is a worker of `verify campaign`, started by `executor`.  It collects all tests as any
campaign does, says what there is on the socket of --lease-socket, and then answers requests there,
one JSON object a line.  One judge and its cells serve all
leases.  Verdicts go into the evidence of the session's run, as always.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator, Iterator
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, cast

import msgspec
import pytest

from verify.campaign import durations, halt, search_scope
from verify.campaign.leases.plan import Unit
from verify.campaign.leases.requests import Answer, Check, Hello, Request, Work
from verify.machine.places import state_directory

# Hypothesis draws from the constants of all modules of ours that are imported.  What a seed means
# must not depend on the leases before, so everything that a lease may import is imported first.
_DECIDING = ("references", "verify.problem", "verify.tolerance", "verify.judging", "verify.oracles")
_READER = msgspec.json.Decoder(Request)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that makes a session a worker."""
    parser.getgroup("verify").addoption("--lease-socket", type=int, metavar="DESCRIPTOR")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let the seed of a lease count in every profile."""
    from hypothesis import settings

    settings.register_profile("leased", settings(), derandomize=False)
    settings.load_profile("leased")
    config.pluginmanager.register(_Watch(), "verify-lease-watch")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Serve leases until the socket ends."""
    if session.testsfailed:
        raise session.Interrupted("the tests cannot be collected")
    for package in _DECIDING:
        for name in _modules(package):
            import_module(name)
    with socket.socket(fileno=session.config.getoption("--lease-socket")) as coordinator:
        _Worker(session).serve(coordinator)
    # The session's end would write a report: it is the coordinator's to write.
    os._exit(0)


class _Watch:
    """Remembers the judge of the session."""

    def __init__(self) -> None:
        self.judge: Any = None

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        """See the judge before its test is called."""
        self.judge = pyfuncitem.funcargs.get("judge", self.judge)
        return (yield)

    def counts(self) -> dict[tuple[str, str, str], tuple[int, int]]:
        """Problems drawn and refused so far, by variant, dtype and group."""
        drawn = {} if self.judge is None else self.judge.drawn
        return {key: (count, self.judge.refused.get(key, 0)) for key, count in drawn.items()}


class _Nothing:
    """In place of a next test: tears down all but the session, whose judge goes on."""

    def __init__(self, session: pytest.Session) -> None:
        self.session = session

    def listchain(self) -> list[pytest.Session]:
        return [self.session]


class _Worker:
    """Answers requests with the tests of a session."""

    def __init__(self, session: pytest.Session) -> None:
        self.session = session
        self.items = {item.nodeid: item for item in session.items}
        run = session.config.getoption("--run-id")
        self.directory = (state_directory() / "runs" / run).absolute()
        plugin = session.config.pluginmanager.get_plugin("verify-lease-watch")
        self.watch = cast(_Watch, plugin)

    def serve(self, coordinator: socket.socket) -> None:
        """Say what there is, then answer each request."""
        coordinator.sendall(msgspec.json.encode(self.hello()) + b"\n")
        for line in coordinator.makefile("rb"):
            request = _READER.decode(line)
            answer = self.check(request) if isinstance(request, Check) else self.work(request)
            coordinator.sendall(msgspec.json.encode(answer) + b"\n")

    def hello(self) -> Hello:
        """What this worker is, and what it can be asked."""
        from verify.campaign.leases.sources import sources_hash
        from verify.machine import device

        roster = roster_of(self.directory)
        hashes = sorted((each.ref, each.source_hash) for each in roster.declarations)
        failures = sorted(each.ref for each in roster.failures)
        return Hello(
            device=device.fingerprint(),
            uuid=device.own(),
            units=tuple(map(_unit, self.session.items)),
            kernels=sha256(repr((hashes, failures)).encode()).hexdigest()[:12],
            sources=sources_hash(),
            unusable=roster.unusable or "",
        )

    def check(self, request: Check) -> Answer:
        """Judge the control problem."""
        from verify.campaign.leases import control

        begun = time.monotonic()
        try:
            wrong = control.check(request.seed)
        except RuntimeError as error:
            wrong = f"the control problem was not computed: {error}"
        return Answer(seconds=time.monotonic() - begun, wrong=wrong)

    def work(self, request: Work) -> Answer:
        """Run one test with one seed."""
        from hypothesis import core

        from verify.evidence import errors

        item = self.items.get(request.node)
        if item is None:
            return Answer(errors=(("", request.node, "there is no such test here"),))
        search_scope.begin(request.lease, self.directory / "known", request.node)
        if not request.shrinks:
            search_scope.known(self.directory / "known", request.node)
        before = self.watch.counts()
        vars(core)["global_force_seed"] = request.seed
        begun = time.monotonic()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=_Nothing(self.session))
        seconds = time.monotonic() - begun
        found = errors.read(self.directory)
        errors.begin(self.directory)
        drawn = []
        for key, (count, refused) in sorted(self.watch.counts().items()):
            count_before, refused_before = before.get(key, (0, 0))
            if count > count_before:
                drawn.append((*key, count - count_before, refused - refused_before))
        return Answer(
            seconds=seconds,
            drawn=tuple(drawn),
            errors=tuple((each.variant, each.test, each.message) for each in found),
            stopped=halt.over(),
        )


def roster_of(directory: Path) -> Any:
    """The roster that a run has written down."""
    from verify.cell.discovery import Roster

    return Roster.loads((directory / "roster.json").read_text(encoding="utf-8"))


def _unit(item: pytest.Item) -> Unit:
    return Unit(
        node=item.nodeid,
        seeded=durations.draws(item),
        family=_family(getattr(getattr(item, "callspec", None), "params", {})),
        seconds=durations.seconds(item),
    )


def _family(given: Any) -> str:
    """The kernel file that a test with these parameters loads."""
    targets = [given["target"]] if "target" in given else [*given.get("targets", ())]
    targets += [given["witness"][0]] if "witness" in given else []
    declarations = [target.declaration for target in targets]
    declarations += [given["declaration"]] if "declaration" in given else []
    return str(declarations[0].ref) if declarations else ""


def _modules(package: str) -> Iterator[str]:
    """A package and all modules in it."""
    found = import_module(package)
    yield package
    for module in walk_packages(found.__path__, f"{package}."):
        yield module.name
