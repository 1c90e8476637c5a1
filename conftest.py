"""pytest's configuration: Hypothesis profiles, a GPU for each worker, options, evidence, report."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Generator, Hashable, Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings

from verify.bundle import ROOT
from verify.machine import device, leash  # imports no torch
from verify.machine.dealing import alone, dealt
from verify.machine.defaults import PROFILES
from verify.machine.settings import SettingError, check

if str(ROOT) not in sys.path:  # the plugin is imported before a test brings its folder
    sys.path.append(str(ROOT))
pytest_plugins = ("tests.properties.tier",)
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if _WORKER:  # this process must not outlive the one that started it
    leash.die_with(os.getppid())


def _pin_gpu(worker: str) -> None:
    """Assign the GPUs to the workers in turn, before CUDA starts."""
    mask = device.gpus_for(worker)
    if mask is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = mask


_pin_gpu(_WORKER)

from verify.campaign import builds, durations, halt  # noqa: E402 - after the mask
from verify.campaign.conclusion import campaign_fails, write_report  # noqa: E402
from verify.campaign.edge_cases import leads  # noqa: E402
from verify.campaign.gpus.placement import place_workers  # noqa: E402
from verify.campaign.gpus.watch import choose_gpus, watch_gpus, wrong_gpus  # noqa: E402
from verify.campaign.interruption import MARKER  # noqa: E402
from verify.campaign.judge import Judge  # noqa: E402
from verify.campaign.run import (  # noqa: E402
    BusyError,
    CampaignRun,
    ContinuedError,
    default_profile,
    open_run,
)
from verify.campaign.runner import NO_SPACE  # noqa: E402
from verify.campaign.without_verdict import RecordsErrors, tell  # noqa: E402
from verify.cell.discovery import environment  # noqa: E402
from verify.cell.process import ForkServer  # noqa: E402
from verify.evidence import errors  # noqa: E402
from verify.evidence.judge_version import judge_changed  # noqa: E402
from verify.evidence.known_failures import XfailsError, at_start, begin_with  # noqa: E402
from verify.machine.outside_file import OutsideFileError  # noqa: E402
from verify.oracles import use_files  # noqa: E402
from verify.problem import kind_files  # noqa: E402

_COMMON = {
    "deadline": None,  # the cell has its own deadlines
    "database": None,  # failing cases are stored by id, which survives a change of strategies
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    "phases": (Phase.explicit, Phase.generate, Phase.shrink),
    "report_multiple_bugs": False,
}
settings.register_profile("dev", max_examples=12, **_COMMON)
settings.register_profile("ci", max_examples=10, derandomize=True, print_blob=False, **_COMMON)
settings.register_profile("gpu", max_examples=200, **_COMMON)
settings.register_profile("nightly", max_examples=2000, verbosity=Verbosity.quiet, **_COMMON)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("verify")
    group.addoption(
        "--kernel",
        action="append",
        default=[],
        metavar="FILE",
        help="try this kernel file, not the collection",
    )
    group.addoption(
        "--oracle",
        action="append",
        default=[],
        metavar="FILE",
        help="ask the oracles of this file, too",
    )
    group.addoption(
        "--profile",
        default=None,
        choices=PROFILES,
        help="how many cases, how random",
    )
    group.addoption(
        "--examples",
        type=int,
        default=None,
        help="cases per target, instead of the profile's number",
    )
    group.addoption(
        "--all-configs",
        action="store_true",
        help="judge the further configs of the variants, too",
    )
    group.addoption(
        "--run-id", default=None, help="continue that run: what it has judged is not judged again"
    )
    group.addoption(
        "--report-dir",
        default=None,
        help="where the accuracy report goes (default: .verify/report/<device>)",
    )


def pytest_configure(config: pytest.Config) -> None:
    choose_gpus(config)
    config.addinivalue_line(
        "markers", "targets_of(group): parametrizes a property test with the group's targets"
    )
    config.addinivalue_line(
        "markers",
        "family_targets(family): the same for a family of groups; the test draws the group",
    )
    config.addinivalue_line(
        "markers",
        "compiles: a test for every variant that compiles without a GPU, and every architecture",
    )
    config.addinivalue_line(
        "markers",
        "long(seconds): a long test; workers start with these, so that they end together",
    )
    config.addinivalue_line(
        "markers",
        "covers(profiles=..., leading=...): a test for every variant, config and dtype, or for each"
        " variant's leading config alone",
    )
    try:
        check()
    except SettingError as error:
        raise pytest.UsageError(str(error)) from None
    profile = config.getoption("--profile") or default_profile()
    settings.load_profile(profile)
    examples = config.getoption("--examples")
    if examples is not None:
        settings.register_profile("chosen", settings.get_profile(profile), max_examples=examples)
        settings.load_profile("chosen")
    if profile == "nightly" and config.getoption("--hypothesis-seed", default=None) is None:
        config.option.hypothesis_seed = str(datetime.now(UTC).date().toordinal())
    try:  # in every worker, before a test is collected
        use_files([Path(file) for file in config.getoption("--oracle")])
    except OutsideFileError as error:
        raise pytest.UsageError(f"--oracle: {error}") from None
    try:
        kind_files.load()
    except OutsideFileError as error:
        raise pytest.UsageError(f"--with: {error}") from None
    files = [Path(file) for file in config.getoption("--kernel")]
    run_id = getattr(config, "workerinput", {}).get("verify_run") or config.getoption("--run-id")
    options = {name: config.getoption(f"--{name}") for name in ("all-configs", "thorough")}
    options = {name.replace("-", "_"): given for name, given in options.items()}
    run = config.stash[_RUN] = open_run(profile, files, run_id, **options)
    run.fork_server = ForkServer(environment())  # its process starts at the first request
    marker = run.directory.absolute() / "failed" if config.getoption("maxfail") == 1 else None
    halt.stop_at_first_failure(marker)
    halt.stop_at_interruption(run.directory.absolute() / MARKER)
    if hasattr(config, "workerinput"):
        begin_with(config.workerinput["verify_xfails"])
    else:
        try:
            at_start()  # before any kernel is loaded, since a kernel could write such a file
            if run_id is not None:
                config.stash[_LOCK] = run.lock()
            run.resume()
        except (BusyError, ContinuedError, XfailsError) as error:
            raise pytest.UsageError(str(error)) from None
        errors.begin(run.directory)
        if marker is not None:
            marker.unlink(missing_ok=True)
        config.pluginmanager.register(RecordsErrors(run), "verify-errors")
    watch_gpus(config, run.directory)


def pytest_configure_node(node: object) -> None:
    node.workerinput["verify_run"] = node.config.stash[_RUN].directory.name  # type: ignore[attr-defined]
    node.workerinput["verify_xfails"] = at_start()  # type: ignore[attr-defined]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    choose_gpus(config)
    return place_workers()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    run = metafunc.config.stash[_RUN]
    marker = metafunc.definition.get_closest_marker("targets_of")
    if marker is not None:
        targets = run.targets(marker.args[0])
        metafunc.parametrize("target", [pytest.param(target, id=target.id) for target in targets])
    marker = metafunc.definition.get_closest_marker("family_targets")
    if marker is not None:
        families = run.families(marker.args[0])
        metafunc.parametrize(
            "targets", [pytest.param(targets, id=targets[0].id) for targets in families]
        )
    marker = metafunc.definition.get_closest_marker("covers")
    if marker is not None:
        asked = run.profile in marker.kwargs.get("profiles", (run.profile,))
        groups = ("accuracy", "gradients") if asked else ()
        every = (target for group in groups for target in run.targets(group))
        led = marker.kwargs.get("leading", False)
        targets = [target for target in every if leads(target) or not led]
        metafunc.parametrize(
            "target", [pytest.param(target, id=f"{target.group}-{target.id}") for target in targets]
        )
    if metafunc.definition.get_closest_marker("compiles") is not None:
        arches = builds.arches(run.profile, run.roster.declarations, first_look=run.is_first_look)
        pairs = [(each, arch) for each in run.compiled for arch in arches[each.ref]]
        ids = [f"{declaration.ref}-{arch}" for declaration, arch in pairs]
        metafunc.parametrize(("declaration", "arch"), pairs, ids=ids)
    if "unloadable" in metafunc.fixturenames:
        metafunc.parametrize(
            "unloadable", [pytest.param(failure, id=failure.ref) for failure in run.roster.failures]
        )
    if "witness" in metafunc.fixturenames:
        metafunc.parametrize(
            "witness", [pytest.param(pair, id=pair[1]) for pair in run.witnesses()]
        )


def pytest_collection(session: pytest.Session) -> None:
    """Import the test files, each worker in another order: a fresh checkout's must be compiled,
    with their assertions rewritten, and a worker reads what another one has compiled."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    folders = [Path(argument) for argument in session.config.args]
    files = sorted(file for folder in folders for file in folder.rglob("test_*.py"))
    begin = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for file in (*files[begin:], *files[:begin]):
        # The collection imports it again, and reports the error.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            import_module(".".join(file.resolve().relative_to(ROOT).with_suffix("").parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove tests without parameters (no known failure, no file that does not load), which pytest
    would report as skipped."""
    idle = [item for item in items if item.name.endswith("[NOTSET]")]
    if idle:
        config.hook.pytest_deselected(items=idle)
        items[:] = [item for item in items if item not in idle]
    if halt.limited():  # verify.campaign.chosen orders them
        return
    # A campaign that stops at its first failure comes to it sooner by its quick tests.
    seconds = _no_seconds if config.getoption("maxfail") == 1 else durations.seconds
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    # On a GPU builds take longer than draws: then each test is its own kin.
    on_gpu = device.fingerprint()["kind"] == "cuda"
    items[:] = dealt(items, seconds, workers, alone if on_gpu else _source)


def pytest_collection_finish() -> None:
    """Freeze the imported modules: Python's garbage collections skip them from now on."""
    gc.collect()
    gc.freeze()


def _no_seconds(item: pytest.Item) -> float:
    return 0.0


def _source(item: pytest.Item) -> Hashable:
    """What items of one function share if the problems of their targets are the same draws."""
    target = item.callspec.params.get("target") if hasattr(item, "callspec") else None
    return item if target is None else (item.nodeid.partition("[")[0], target.declaration.ref)


@pytest.fixture(scope="session")
def judge(pytestconfig: pytest.Config) -> Iterator[Judge]:
    """This worker's judge."""
    judge = pytestconfig.stash[_RUN].judge(_WORKER or "main")
    yield judge
    judge.close()


@pytest.fixture(scope="session", name="builder")
def _builder(pytestconfig: pytest.Config) -> Iterator[builds.Builder]:
    """This worker's builder."""
    opened = pytestconfig.stash[_RUN].builder(_WORKER or "main")
    yield opened
    opened.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a test as expected to fail (xfail) if all its failing verdicts are known defects."""
    report = yield
    if report.failed and call.excinfo is not None:
        tell(item, report, call.excinfo.value)
    judge = getattr(item, "funcargs", {}).get("judge")
    if report.when == "call" and judge is not None:
        met, judge.met = list(dict.fromkeys(entry.told for entry in judge.met)), []
        if met and report.passed:
            report.outcome, report.wasxfail = "skipped", "; ".join(met)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """End a test whose search is over as one that has passed, if it is a campaign's, and raise the
    failure that is made no smaller."""
    __tracebackhide__ = True
    try:
        return (yield)
    except halt.ShrinkingOver as end:
        raise end.failure from None
    except halt.SearchOver:
        if "judge" not in pyfuncitem.funcargs:
            raise
        return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Stop this worker if a campaign with --exitfirst has failed in any worker, or if a GPU is
    quarantined."""
    done = yield
    if why := halt.stopped():
        item.session.shouldstop = why
    return done


def pytest_unconfigure(config: pytest.Config) -> None:
    run = config.stash.get(_RUN, None)
    if run is not None and run.fork_server is not None:
        run.fork_server.close()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput") and not session.config.option.collectonly:
        run = session.config.stash[_RUN]
        wrong = wrong_gpus(session.config)
        if wrong:  # no report: the same run can go on with the other GPUs
            session.config.stash[_REPORT] = wrong
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
            return
        changed = judge_changed(run.evidence())
        try:
            text = write_report(run, session.config.getoption("--report-dir"))
            session.config.stash[_REPORT] = "\n".join(filter(None, (text, changed)))
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            session.config.stash[_REPORT] = f"no report: OSError: {error}"
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
        if changed:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
        if session.exitstatus == 0 and campaign_fails(run):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if run.unusable is not None:
            # In the form of pytest's own usage errors.
            session.config.stash[_REPORT] = f"ERROR: {run.unusable}"
            session.exitstatus = pytest.ExitCode.USAGE_ERROR


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    text = config.stash.get(_REPORT, None)
    if text:
        terminalreporter.section("accuracy report")
        terminalreporter.write_line(text)


_RUN: pytest.StashKey[CampaignRun] = pytest.StashKey()
_REPORT: pytest.StashKey[str] = pytest.StashKey()
_LOCK: pytest.StashKey[object] = pytest.StashKey()
