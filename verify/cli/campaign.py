"""`verify campaign`: judge kernels on many machines and GPUs."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from verify.campaign.runner import (
    CLEAN,
    FAILED,
    INFRASTRUCTURE,
    RunnerError,
    RunRequest,
    failing,
    interruptible,
    say,
)
from verify.cli import options
from verify.cli.files import Files
from verify.cli.options import UsageError, console, existing
from verify.cli.summary import continue_command, finish
from verify.evidence import load
from verify.evidence.errors import read as errors_of
from verify.evidence.judge_version import judge_changed
from verify.machine.extras import lacking
from verify.machine.places import state_directory
from verify.machine.settings import KIND_FILES

if TYPE_CHECKING:
    from verify.campaign.leases.coordinator import Coordinator

_PLACES = "--local, --ssh, --scheduler, --scheduler-file"


@dataclass(frozen=True)
class _Ending:
    """complete: whether an incomplete campaign is an error.  strict, files: of `verify run`."""

    complete: bool
    strict: bool
    exit_first: bool
    files: Files


@click.command()
@options.kernels
@click.option(
    "--local", type=click.IntRange(1, 512), metavar="N", help="Start N workers on this machine."
)
@click.option("--ssh", metavar="HOST,...", help="Let these hosts start their workers, by ssh.")
@click.option("--scheduler", metavar="ADDRESS", help="Use the workers of this Dask scheduler.")
@click.option(
    "--scheduler-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Use those of the scheduler that wrote this file.",
)
@click.option(
    "--join",
    metavar="ADDRESS|FILE",
    help="Start this machine's workers for that scheduler, one a GPU, and wait for its end.",
)
@click.option(
    "--workers-here",
    type=click.IntRange(1, 512),
    help="With --join: so many workers; default: one a GPU, or one for two cores.",
)
@click.option("--listen", metavar="ADDRESS", help="With --ssh: this machine, as the hosts know it.")
@click.option("--python", default="python3", show_default=True, help="With --ssh: their Python.")
@click.option(
    "--seeds",
    type=click.IntRange(1, 100_000),
    default=1,
    show_default=True,
    help="Seeds: each random test is judged with so many.",
)
@options.oracles_and_names
@options.only_dtypes
@options.with_files
@options.examples
@options.time
@options.profile
@options.seed
@options.run_id
@options.select
@options.all_configs
@options.exit_first
@options.strict
@options.exports
def campaign(kernels: tuple[Path, ...], seeds: int, strict: bool, **choices: Any) -> int:
    """Judge KERNELS (by default the collection) on many machines and GPUs, through Dask.

    Targets times seeds are given out as leases. What a lost worker had is given again; the same
    command with the --run-id of an earlier one goes on with it. Each kind of device gets all
    leases, and a report; with several kinds, the name of each goes into those of --junit's and
    --sarif's files.

    \b
    verify campaign my_kernel.py --local 2 --seeds 10
    verify campaign --ssh gpu1,gpu2 --seeds 100
    verify campaign --scheduler-file scheduler.json --seeds 100
    verify campaign --join scheduler.json
    """
    _check_place(choices)
    if (missing := lacking("distributed")) is not None:
        raise RunnerError(missing, INFRASTRUCTURE)
    if choices["join"] is not None:
        return _join(choices["join"], choices["workers_here"])
    return _judge(existing(kernels), seeds, strict, choices)


def _check_place(choices: dict[str, Any]) -> None:
    given = [
        name
        for name in ("local", "ssh", "scheduler", "scheduler_file", "join")
        if choices[name] is not None
    ]
    if len(given) != 1:
        raise UsageError(f"give exactly one of {_PLACES} and --join")
    if choices["workers_here"] is not None and given != ["join"]:
        raise UsageError("--workers-here: needs --join")
    for name in ("ssh", "join", "scheduler"):
        if choices[name] is not None and not choices[name].strip(", "):
            raise UsageError(f"--{name}: names nothing")
    if choices["ssh"] is not None:
        for host in choices["ssh"].split(","):
            if not re.fullmatch(r"[A-Za-z0-9_][\w.@:-]*", host.strip()):
                raise UsageError(f"--ssh: {host!r} is no host")


def _join(scheduler: str, count: int | None) -> int:
    from verify.campaign.leases import hosts

    try:
        with interruptible():
            bad = hosts.join(scheduler, count, state_directory() / "workers")
    except hosts.HostError as error:
        raise UsageError(f"--workers-here: {error}") from None
    return INFRASTRUCTURE if bad else CLEAN


def _judge(kernels: tuple[Path, ...], seeds: int, strict: bool, choices: dict[str, Any]) -> int:
    from verify.campaign.leases import command, journal
    from verify.campaign.leases.coordinator import ContinuedError, Coordinator, Plan
    from verify.campaign.leases.engine import EngineError
    from verify.campaign.leases.hosts import HostError
    from verify.campaign.leases.merged import Merged
    from verify.campaign.progress import shown

    run_id = choices["run_id"]
    directory = command.campaign_directory(run_id)
    seconds = choices["seconds"]
    until = None if seconds is None else time.monotonic() + seconds
    try:
        with command.locked(directory), interruptible():
            plan = Plan(
                spec=_spec(kernels, choices, command.stored_failures(directory)),
                seeds=_seeds(choices["seed"], seeds, run_id),
                sources=_sources(kernels, choices),
                exit_first=choices["exit_first"],
                until=until,
            )
            merged = Merged(directory, state_directory() / "runs")
            with _place(choices).engine(run_id, directory) as engine:
                coordinator = Coordinator(plan, merged, engine, lambda line: say(console, line))
                progress = command.LeaseProgress(coordinator, until)
                with shown(console, False) as display:
                    coordinator.tick = lambda: display.show(progress)
                    coordinator.open()
                    try:
                        coordinator.run()
                    finally:
                        coordinator.close()
    except (ContinuedError, command.BusyError) as error:
        raise UsageError(str(error)) from None
    except HostError as error:
        raise UsageError(f"{'--local' if choices['local'] else '--ssh'}: {error}") from None
    except (EngineError, journal.JournalError) as error:
        say(console, f"verify: {error}")
        return _unfinished(run_id)
    except (OSError, TimeoutError) as error:
        raise RunnerError(f"campaign {run_id}: {error}", INFRASTRUCTURE) from None
    except KeyboardInterrupt:
        console.print("interrupted", style="bold yellow", highlight=False)
        return _unfinished(run_id)
    narrowed = [each for each in choices["oracles"] if isinstance(each, str)]
    whole = until is None and not narrowed and not choices["only_dtypes"]
    files = Files(choices["junit"], choices["sarif"], choices["summary"])
    return _conclude(coordinator, _Ending(whole, strict, choices["exit_first"], files))


def _conclude(coordinator: Coordinator, ending: _Ending) -> int:
    """Write and print a report for each kind of device; returns the exit code of all."""
    from verify.campaign.conclusion import write_report
    from verify.campaign.leases.command import account
    from verify.campaign.run import CampaignRun

    if coordinator.usage:
        raise UsageError(coordinator.usage)
    options.load_kinds()
    merged = coordinator.merged
    state = coordinator.state
    judged = []
    for kind in sorted(state.units):
        directory = merged.run(kind)
        if directory.is_dir():
            merged.conclude(kind, state)
            judged += [kind] if load(directory).verdicts else []
    found = []
    for kind in judged:
        write_report(CampaignRun(merged.run(kind), "", ()))
        request = RunRequest(run_id=merged.run_id(kind), exit_first=ending.exit_first)
        files = ending.files if len(judged) == 1 else ending.files.of(kind)
        status = _status(request)
        found.append(finish(request, status, None, ending.complete, ending.strict, files))
    account(coordinator, console)
    unfinished = state.open and not coordinator.stopping
    if unfinished:
        say(console, f"verify: {state.open} leases were not done: no worker is left that may")
    if unfinished or (coordinator.stopping and not ending.exit_first):
        _say_how_to_continue(merged.directory.name)
    if not found:
        say(console, "nothing was judged")
        return INFRASTRUCTURE
    if FAILED in found:
        return FAILED
    return INFRASTRUCTURE if unfinished or any(found) else CLEAN


def _status(request: RunRequest) -> int:
    """The exit code of one kind's evidence, before its report is looked at."""
    evidence = load(request.directory)
    changed = judge_changed(evidence)
    if changed is not None:
        say(console, changed)
        return INFRASTRUCTURE
    if failing(evidence):
        return FAILED
    return INFRASTRUCTURE if errors_of(request.directory) else CLEAN


def _unfinished(run_id: str) -> int:
    """Say how to continue a campaign that did not come to its end; returns the exit code.  A
    failure on record counts."""
    _say_how_to_continue(run_id)
    runs = (state_directory() / "runs").glob(f"{run_id}.*")
    return FAILED if any(failing(load(each)) for each in runs) else INFRASTRUCTURE


def _say_how_to_continue(run_id: str) -> None:
    line = f"continue with: {continue_command(run_id)}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _spec(kernels: tuple[Path, ...], choices: dict[str, Any], failures: str) -> Any:
    from verify.campaign.leases import executor
    from verify.campaign.leases.command import variables

    oracles = choices["oracles"]
    request = RunRequest(
        kernels=kernels,
        oracles=tuple(each for each in oracles if isinstance(each, Path)),
        only_oracles=tuple(each for each in oracles if isinstance(each, str)),
        only_dtypes=choices["only_dtypes"],
        profile=choices["profile"],
        examples=choices["examples"],
        select=choices["select"],
        all_configs=choices["all_configs"],
        exit_first=choices["exit_first"],
        workers="0",
        run_id=executor.RUN,
    )
    return executor.Spec(
        campaign=choices["run_id"],
        arguments=tuple(request.arguments()),
        files=tuple(str(each) for each in (*kernels, *request.oracles)),
        kinds=_kinds(),
        variables=variables(),
        failures=failures,
        seconds=choices["seconds"],
    )


def _kinds() -> tuple[str, ...]:
    import os

    return tuple(each for each in os.environ.get(KIND_FILES, "").split(os.pathsep) if each)


def _sources(kernels: tuple[Path, ...], choices: dict[str, Any]) -> str:
    from verify.campaign.leases.sources import sources_hash

    files = [each for each in choices["oracles"] if isinstance(each, Path)]
    return sources_hash([*kernels, *files])


def _seeds(first: int | None, count: int, run_id: str) -> tuple[int, ...]:
    """Seeds that the campaign's name decides, if no first one is given: so it can go on."""
    if first is None:
        first = int.from_bytes(run_id[-6:].encode(), "big")
    return tuple(range(first, first + count))


def _place(choices: dict[str, Any]) -> Any:
    from verify.campaign.leases.command import Place

    hosts = [each.strip() for each in (choices["ssh"] or "").split(",")]
    return Place(
        local=choices["local"],
        ssh=tuple(filter(None, hosts)),
        scheduler=choices["scheduler"] or str(choices["scheduler_file"] or ""),
        python=choices["python"],
        listen=choices["listen"],
    )
