"""A campaign's run: its directory, its kernels, its targets and the stored failures."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from verify.campaign import first_look, opening
from verify.campaign.admission import unanswerable
from verify.campaign.builds import Builder, environment_for
from verify.campaign.gpus.state import recorder_name
from verify.campaign.judge import Judge
from verify.campaign.targets import Target, excludes_here, targets_of
from verify.cell.discovery import Roster, environment, roster
from verify.cell.process import ForkServer
from verify.evidence import (
    Evidence,
    Recorder,
    load,
    new_run_id,
)
from verify.evidence.known_failures import Xfails, xfails_for
from verify.machine import device
from verify.machine.places import state_directory
from verify.oracles import groups
from verify.problem.case import Case, CaseError
from verify.variant import Declaration

_ROSTER, _LOST = "roster.json", "lost.txt"
FAILURES = "known-failures.txt"  # in the state directory: cases that the next run asks first


def default_profile() -> str:
    """The profile "gpu" if there is a device, "ci" if the variable CI is set, else "dev"."""
    return "gpu" if torch.cuda.is_available() else "ci" if os.environ.get("CI") else "dev"


class ContinuedError(Exception):
    """A run cannot continue: a kernel file has changed since it was judged."""


class BusyError(Exception):
    """Another process is judging this run."""


@dataclass
class CampaignRun:
    """A run in progress: its directory, its profile and its kernel files (none: the collection).

    all_configs: whether it judges the variants' further configs, too.  thorough: whether it leaves
    out nothing in profile dev.
    fork_server: starts the kernel processes of the roster and of the judge; its owner closes it.
    None: the roster and the judge each start their own.
    """

    directory: Path
    profile: str
    files: tuple[Path, ...]
    fork_server: ForkServer | None = None
    all_configs: bool = False
    thorough: bool = False

    @cached_property
    def roster(self) -> Roster:
        """The declarations of the kernel files.  The first process discovers them and writes them
        down; the others read them."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / _ROSTER
        with FileLock(self.directory / "roster.lock"):
            if not path.exists():
                discovered = roster(list(self.files) or None, self.fork_server)
                _record(self, discovered)
                path.write_text(discovered.dumps(), encoding="utf-8")
        return Roster.loads(path.read_text(encoding="utf-8"))

    @property
    def unusable(self) -> str | None:
        """One line that says why none of the kernel files given by the user loads, which is a usage
        error; else None."""
        begun = self.files and (self.directory / _ROSTER).exists()
        return self.roster.unusable if begun else None

    def evidence(self) -> Evidence:
        """What is on record now; nothing if the run has not begun."""
        return load(self.directory) if self.directory.exists() else Evidence()

    def lock(self) -> FileLock:
        """Lock this run until this process ends.  Raises BusyError if another process has it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.directory / "run.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise BusyError(
                f"--run-id: another process is judging run {self.directory.name}; wait for its end,"
                " or name another run"
            ) from None
        return lock

    def resume(self) -> None:
        """If this run has begun before, discover the kernels again, and find the cases that were
        begun and never judged.

        The first process calls it before it starts workers.  Raises ContinuedError if a kernel has
        changed since, or if another device was judged: verdicts of two would mix.
        """
        path = self.directory / _ROSTER
        if not path.exists():
            return
        evidence = load(self.directory)
        judged_on = {each.device["slug"]: each.device["name"] for each in evidence.runs}
        here = device.fingerprint()
        if set(judged_on) - {here["slug"]}:
            raise ContinuedError(
                f"run {self.directory.name} judged on another device,"
                f" {', '.join(judged_on.values())}; this is {here['name']}: begin another run, with"
                " another id"
            )
        now = opening.outside_files()
        for name, option in (("oracles", "--oracle"), ("kinds", "--with")):
            if evidence.runs and evidence.runs[-1].versions.get(name) != now.get(name):
                raise ContinuedError(
                    f"run {self.directory.name} used other files of {name} ({option}): begin"
                    " another run, with another id"
                )
        before = {entry.ref: entry.source_hash for entry in evidence.variants}
        discovered = roster(list(self.files) or None)
        changed = [
            d.ref
            for d in discovered.declarations
            if before.get(d.ref, d.source_hash) != d.source_hash
        ]
        judged = {entry.path for entry in evidence.variants if entry.source_hash}
        changed += [each.ref for each in discovered.failures if judged & {each.ref, each.path}]
        if changed:
            raise ContinuedError(
                f"run {self.directory.name} judged other sources of {', '.join(changed)}: begin"
                " another run, with another id"
            )
        _record(self, discovered)
        _record_uncounted(self, evidence)
        path.write_text(discovered.dumps(), encoding="utf-8")
        unjudged = (*evidence.lost, *evidence.interrupted)
        lost = "".join(f"{begin.case}\n" for begin in unjudged)
        (self.directory / _LOST).write_text(lost, encoding="utf-8")

    @cached_property
    def xfails(self) -> Xfails:
        """The known defects expected on this machine today.  Raises XfailsError."""
        return xfails_for(device.fingerprint())

    @cached_property
    def here(self) -> tuple[Declaration, ...]:
        """The variants that can run on this machine."""
        return tuple(
            declaration
            for declaration in self.roster.declarations
            if excludes_here(declaration) is None
        )

    def targets(self, group: str) -> list[Target]:
        """The targets of one group of oracles that this run asks, in a stable order."""
        targets = targets_of(self.here, group, all_configs=self.all_configs)
        return first_look.asked(group, targets) if self.is_first_look else targets

    @property
    def is_first_look(self) -> bool:
        """Whether some groups are asked of few targets: see `first_look`."""
        return self.profile == "dev" and not (self.files or self.all_configs or self.thorough)

    def families(self, family: str) -> list[tuple[Target, ...]]:
        """The targets of a family's groups in a stable order, one tuple per variant, config and
        dtype."""
        by_id: dict[str, list[Target]] = {}
        for group in groups().values():
            for target in self.targets(group.name) if group.family == family else ():
                by_id.setdefault(target.id, []).append(target)
        return [tuple(targets) for targets in by_id.values()]

    @property
    def compiled(self) -> tuple[Declaration, ...]:
        """The variants that can be compiled here without a GPU, even if they cannot run."""
        return tuple(d for d in self.roster.declarations if d.compiles and d.uncompilable is None)

    def builder(self, worker: str) -> Builder:
        """A builder that records under the worker's name."""
        fork_server = ForkServer(environment_for(self.compiled))
        return Builder(Recorder(self.directory, f"{worker}-builds"), self.profile, fork_server)

    def judge(self, worker: str) -> Judge:
        """A judge that records under the worker's name and reuses this run's earlier verdicts."""
        remembered = load(self.directory) if any(self.directory.glob("*.jsonl")) else None
        fork_server = self.fork_server or ForkServer(environment())
        recorder = Recorder(self.directory, recorder_name(worker, device.own()))
        return Judge(recorder, remembered, self.xfails, fork_server)

    def target_of(self, case: Case) -> Target | None:
        """The target of a case, or None if its variant or config is not known here."""
        return _target_among(self.here, case)

    def witnesses(self) -> list[tuple[Target, str]]:
        """The stored cases (see `stored_cases`) that the kernels' present declarations allow."""
        return [(target, id_) for target, id_, why in self.stored_cases(self.here) if why is None]

    def stored_cases(self, here: Sequence[Declaration]) -> list[tuple[Target, str, str | None]]:
        """The cases to run first, of variants that can run here; each as (target, case id, reason
        why it cannot be asked today, or None).

        They are declared witnesses, witnesses of known defects, cases that failed before, and those
        that were lost or interrupted.
        """
        ids = [id_ for declaration in here for id_ in declaration.witness]
        ids += [entry.witness for entry in self.xfails.entries]
        for path in (state_directory() / FAILURES, self.directory / _LOST):
            ids += path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        entries = []
        for id_ in dict.fromkeys(ids):
            try:
                case = Case.parse(id_)
            except CaseError:
                continue
            target = _target_among(here, case)
            if target is not None:
                entries.append((target, id_, unanswerable(target, case.problem)))
        return entries


def _target_among(declarations: Sequence[Declaration], case: Case) -> Target | None:
    for declaration in declarations:
        if declaration.ref == case.variant:
            with contextlib.suppress(KeyError):
                config = declaration.config(case.config)
                return Target(declaration, config, case.problem.dtype, case.group)
    return None


def open_run(
    profile: str,
    files: list[Path],
    run_id: str | None = None,
    *,
    all_configs: bool = False,
    thorough: bool = False,
) -> CampaignRun:
    """Begin a run, or continue the run with that id."""
    directory = state_directory() / "runs" / (run_id or new_run_id())
    return CampaignRun(directory, profile, tuple(files), None, all_configs, thorough)


def _record(run: CampaignRun, discovered: Roster) -> None:
    """Record the run, its variants, those that cannot run, and why."""
    declarations = discovered.declarations
    here = [each for each in declarations if excludes_here(each) is None]
    unusable = bool(run.files) and discovered.unusable is not None
    with Recorder(run.directory, "campaign") as recorder:
        for record in (
            opening.run_info(run.directory.name, run.profile),
            *opening.variants(declarations),
            *opening.builds_left_out(declarations, run.profile, first_look=run.is_first_look),
            *(first_look.left_out(here) if run.is_first_look else ()),
            *opening.gradients_left_out(here),
            *opening.dropped(run.stored_cases(here)),
            *opening.other_files(discovered, failing=not unusable),
        ):
            recorder.write(record)


def _record_uncounted(run: CampaignRun, evidence: Evidence) -> None:
    """Record how many problems were drawn by processes that ended before they could record it."""
    with Recorder(run.directory, "campaign") as recorder:
        for drawn in opening.uncounted(evidence):
            recorder.write(drawn)
