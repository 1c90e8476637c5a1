"""What `verify campaign` does between its options and its report."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console
from rich.table import Column, Table

from verify.campaign.halt import UNTIL
from verify.campaign.leases import accounting, hosts
from verify.campaign.leases.coordinator import Coordinator, remember
from verify.campaign.leases.dask_engine import DaskEngine
from verify.campaign.progress import Counted, Progress
from verify.evidence.known_failures import handed_on
from verify.machine.places import state_directory
from verify.machine.settings import KIND_FILES, SETTINGS

_FAILURES = "known-failures.txt"
_OF_A_MACHINE = (KIND_FILES, "VERIFY_CUDA_CACHE", "VERIFY_WRITABLE", "VERIFY_BOOTSTRAP")
_PATIENCE = 30.0  # seconds until a scheduler is connected


class BusyError(Exception):
    """Another process has this campaign."""


def campaign_directory(run_id: str) -> Path:
    """The directory of a campaign."""
    return state_directory() / "campaigns" / run_id


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a campaign for this process.  Raises BusyError."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory / "campaign.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise BusyError(
            f"--run-id: another process has campaign {directory.name}; wait for its end, or name"
            " another"
        ) from None
    with lock:
        yield


def variables() -> dict[str, str]:
    """The variables of this process that every worker's session gets."""
    names = [each.name for each in SETTINGS if each.name not in _OF_A_MACHINE]
    found = {name: os.environ[name] for name in (*names, "CI") if name in os.environ}
    found.pop(UNTIL, None)
    return found | handed_on()


def stored_failures(directory: Path) -> str:
    """The stored cases that a campaign asks first: those that its first command found."""
    kept = directory / _FAILURES
    if not kept.exists():
        stored = state_directory() / _FAILURES
        text = stored.read_text(encoding="utf-8") if stored.exists() else ""
        kept.write_text(text, encoding="utf-8")
    return kept.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Place:
    """Where a campaign's workers are: exactly one of these.

    local: so many workers of this machine.  ssh: hosts.  scheduler: an address, or a scheduler
    file.  python: the interpreter of other hosts.  listen: this machine's address, as other hosts
    know it; None: Dask's choice.
    """

    local: int | None = None
    ssh: tuple[str, ...] = ()
    scheduler: str = ""
    python: str = "python3"
    listen: str | None = None

    @contextlib.contextmanager
    def engine(self, campaign: str, directory: Path) -> Iterator[DaskEngine]:
        """The engine.  Raises hosts.HostError, and OSError if no scheduler answers."""
        import dask.config
        from distributed import Client, LocalCluster

        quiet = {"logging.distributed": "error", "distributed.admin.low-level-log-length": 100}
        with contextlib.ExitStack() as stack:
            stack.enter_context(dask.config.set(quiet))
            where = self.scheduler
            if not where:
                host = "127.0.0.1" if self.local is not None else self.listen
                cluster = stack.enter_context(
                    LocalCluster(
                        n_workers=0,
                        host=host,
                        dashboard_address="127.0.0.1:0",  # its default is a port that others use
                        silence_logs=50,
                    )
                )
                where = str(cluster.scheduler_address)
            log = directory / "workers.log"
            if self.local is not None:
                folder = directory / "scratch"
                started = hosts.start_workers(where, self.local, folder, names="local", log=log)
                stack.enter_context(hosts.ended(started))
            elif self.ssh:
                by_ssh = hosts.start_by_ssh(self.ssh, where, self.python, log)
                stack.enter_context(hosts.ended(by_ssh))
            file = {"scheduler_file": where} if Path(where).is_file() else {"address": where}
            client = Client(**file, timeout=_PATIENCE, set_as_default=False)
            engine = DaskEngine(client, campaign, where)
            stack.callback(engine.close)
            yield engine


class LeaseProgress(Progress):
    """The progress of a campaign, from its coordinator.

    before: leases that an earlier command had done.
    """

    def __init__(self, coordinator: Coordinator, deadline: float | None) -> None:
        super().__init__(coordinator.merged.directory, deadline)
        self.coordinator = coordinator

    def text(self) -> str:
        """What is known now, in words."""
        state = self.coordinator.state
        workers = f"{len(state.workers)} worker{'s' * (len(state.workers) != 1)}"
        if not state.all:
            return f"{workers}, starting"
        total = len(state.all)
        self.tests = Counted(total - state.open, total)
        return (
            f"{self.tests.done} of {total} leases, {workers}, {self.coordinator.cases} cases,"
            f" {self.coordinator.failing} failing verdicts"
        )


def account(coordinator: Coordinator, console: Console) -> None:
    """Write what each device did into the campaign's directory, and print it."""
    found = accounting.accounts(coordinator.events())
    path = coordinator.merged.directory / "accounting.json"
    remember(path, [each.data() for each in found])
    if not found:
        return
    table = Table(
        Column("device", overflow="fold"),
        *(Column(name, justify="right") for name in ("leases", "cases", "failing", "busy", "of")),
        *(Column(name, justify="right") for name in ("failed", "lost")),
        "state",
    )
    for each in found:
        table.add_row(
            each.device,
            *map(str, (each.leases, each.cases, each.failing)),
            f"{each.busy:.0f} s",
            f"{each.present:.0f} s",
            *map(str, (each.failed, each.lost)),
            f"quarantined: {each.quarantined}" if each.quarantined else "",
        )
    console.print(table)
