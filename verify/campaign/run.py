"""Campaign: one run of many targets over many workers, its directory, its known failures and its
report."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import hypothesis
import torch
from filelock import FileLock, Timeout

from verify.bundle import published
from verify.campaign.admission import unanswerable
from verify.campaign.builds import Builder, left_out
from verify.campaign.judge import Judge
from verify.campaign.targets import Target, excludes_group, excludes_here
from verify.cell import confinement
from verify.cell.discovery import Roster, Unloadable, environment, roster
from verify.cell.process import ForkServer
from verify.evidence import (
    Drawn,
    Evidence,
    Finding,
    NotRun,
    Recorder,
    RunInfo,
    VariantEntry,
    Verdict,
    load,
    new_run_id,
)
from verify.evidence.judge_version import judge_changed, judge_hash
from verify.evidence.known_failures import (
    FILE,
    Xfails,
    at_start,
    changed_since,
    digest,
    xfails_for,
    xfails_in,
)
from verify.machine import device
from verify.machine.cores import cores
from verify.machine.places import state_directory
from verify.oracles import groups, used_files
from verify.problem.case import Case, CaseError
from verify.report import build, write
from verify.statistics.verdicts import GROUP, findings
from verify.variant import Declaration

_ROSTER, _LOST = "roster.json", "lost.txt"
_WORKER_MEMORY = 3 << 30  # bytes of GPU memory that a worker and its cells may need
_KNOWN = "known-failures.txt"
_WITNESS = "(witness)"  # stands for a dtype in a record of a case that is not asked any more


def default_profile() -> str:
    """gpu where there is a device, ci where CI is set, else dev."""
    return "gpu" if torch.cuda.is_available() else "ci" if os.environ.get("CI") else "dev"


def workers() -> int:
    """Workers for `-n auto`: as many as the cores and, where there is a GPU, its memory allow."""
    if not torch.cuda.is_available():
        return cores()
    free = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
    return max(1, min(sum(memory // _WORKER_MEMORY for memory in free), cores()))


class ContinuedError(Exception):
    """A run that cannot go on: what it has judged is no longer what is on trial."""


class BusyError(Exception):
    """A run that another process is making."""


@dataclass
class CampaignRun:
    """A run that is being made: its directory, profile, and the kernel files on trial (none: the
    collection).

    fork server: what the roster's lives and then the judge's are forked from, for its owner to
    close; None: each has one of its own.
    """

    directory: Path
    profile: str
    files: tuple[Path, ...]
    fork_server: ForkServer | None = None

    @cached_property
    def roster(self) -> Roster:
        """Who is on trial: discovered by the first process that asks, read by the others."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / _ROSTER
        with FileLock(self.directory / "roster.lock"):
            if not path.exists():
                found = roster(list(self.files) or None, self.fork_server)
                _record(self, found)
                path.write_text(found.dumps(), encoding="utf-8")
        return Roster.loads(path.read_text(encoding="utf-8"))

    def lock(self) -> FileLock:
        """Keep this run from other processes until this one ends, however it ends.  Raises
        BusyError if one has it."""
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
        """Find out anew who is on trial, and which cases were begun and never judged, if this run
        goes on.

        For the first process, before its workers.  Raises ContinuedError if a kernel has changed
        since, whose verdicts would be those of another source.
        """
        path = self.directory / _ROSTER
        if not path.exists():
            return
        evidence = load(self.directory)
        if evidence.runs and evidence.runs[-1].versions.get("oracles") != _oracle_files().get(
            "oracles"
        ):
            raise ContinuedError(
                f"run {self.directory.name} asked other oracle files (--oracle): begin another run,"
                " with another id"
            )
        before = {entry.ref: entry.source_hash for entry in evidence.variants}
        found = roster(list(self.files) or None)
        changed = [
            d.ref for d in found.declarations if before.get(d.ref, d.source_hash) != d.source_hash
        ]
        judged = {entry.path for entry in evidence.variants if entry.source_hash}
        changed += [each.ref for each in found.failures if judged & {each.ref, each.path}]
        if changed:
            raise ContinuedError(
                f"run {self.directory.name} judged other sources of {', '.join(changed)}: begin"
                " another run, with another id"
            )
        _record(self, found)
        _record_uncounted(self, evidence)
        path.write_text(found.dumps(), encoding="utf-8")
        lost = "".join(f"{begin.case}\n" for begin in evidence.lost)
        (self.directory / _LOST).write_text(lost, encoding="utf-8")

    @cached_property
    def xfails(self) -> Xfails:
        """The known defects that are expected on this machine today.  Raises XfailsError."""
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
        """Everything to be heard before one group of oracles, in a stable order."""
        return [
            Target(declaration, config, dtype, group)
            for declaration in self.here
            if excludes_group(declaration, group) is None
            for dtype in declaration.support.dtypes
            for config in (
                declaration.configs[:1] if groups()[group].outside else declaration.configs
            )
        ]

    def families(self, family: str) -> list[tuple[Target, ...]]:
        """The targets of a family's groups, those of one variant, config and dtype together, in a
        stable order."""
        found: dict[str, list[Target]] = {}
        for group in groups().values():
            for target in self.targets(group.name) if group.family == family else ():
                found.setdefault(target.id, []).append(target)
        return [tuple(targets) for targets in found.values()]

    @property
    def compiled(self) -> tuple[Declaration, ...]:
        """The variants that can be compiled here without a GPU, whether or not they can run."""
        return tuple(d for d in self.roster.declarations if d.compiles and d.uncompilable is None)

    def builder(self, worker: str) -> Builder:
        """A builder that records under that worker's name."""
        return Builder(Recorder(self.directory, f"{worker}-builds"), self.profile)

    def judge(self, worker: str) -> Judge:
        """A judge that records under that worker's name and remembers what this run has judged
        before."""
        remembered = load(self.directory) if any(self.directory.glob("*.jsonl")) else None
        fork_server = self.fork_server or ForkServer(environment())
        return Judge(Recorder(self.directory, worker), remembered, self.xfails, fork_server)

    def target_of(self, case: Case) -> Target | None:
        """The target that a case belongs to, if its variant and config are known here."""
        return _target_among(self.here, case)

    def witnesses(self) -> list[tuple[Target, str]]:
        """Declared worst cases, those of known defects, cases that failed before or were lost: run
        first.

        Only those that the kernels, as they are declared today, can be asked.
        """
        return [(target, id_) for target, id_, why in self.kept(self.here) if why is None]

    def kept(self, here: Sequence[Declaration]) -> list[tuple[Target, str, str | None]]:
        """What is to be run first, of the variants that can run here; with the reason why it cannot
        be asked today, or None."""
        ids = [id_ for declaration in here for id_ in declaration.witness]
        ids += [entry.witness for entry in self.xfails.entries]
        for path in (state_directory() / _KNOWN, self.directory / _LOST):
            ids += path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found = []
        for id_ in dict.fromkeys(ids):
            try:
                case = Case.parse(id_)
            except CaseError:
                continue
            target = _target_among(here, case)
            if target is not None:
                found.append((target, id_, unanswerable(target, case.problem)))
        return found


def _target_among(declarations: Sequence[Declaration], case: Case) -> Target | None:
    for declaration in declarations:
        configs = {config.name: config for config in declaration.configs}
        if declaration.ref == case.variant and case.config in configs:
            return Target(declaration, configs[case.config], case.problem.dtype, case.group)
    return None


def open_run(profile: str, files: list[Path], run_id: str | None = None) -> CampaignRun:
    """Begin a run, or continue the one of that id."""
    return CampaignRun(state_directory() / "runs" / (run_id or new_run_id()), profile, tuple(files))


def _record(run: CampaignRun, found: Roster) -> None:
    """Write down who is on trial, where, and who is not and why."""
    with Recorder(run.directory, "campaign") as recorder:
        recorder.write(
            RunInfo(
                run=run.directory.name,
                started=datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"),
                profile=run.profile,
                device=device.fingerprint(),
                versions={
                    "torch": torch.__version__,
                    "hypothesis": hypothesis.__version__,
                    "judge": judge_hash(),
                    "cells": confinement.state(),
                    "xfails": digest(at_start()),
                    **_oracle_files(),
                },
            )
        )
        for declaration in found.declarations:
            recorder.write(_entry(declaration))
            reason = excludes_here(declaration)
            if reason is not None:
                recorder.write(NotRun(variant=declaration.ref, reason=reason))
            reason = declaration.uncompilable or left_out(run.profile)
            if declaration.compiles and reason:
                recorder.write(NotRun(variant=declaration.ref, dtype="(builds)", reason=reason))
        here = [
            declaration for declaration in found.declarations if excludes_here(declaration) is None
        ]
        for target, id_, why in run.kept(here):
            if why is not None:
                reason = f"a case on record is dropped, {why}: {id_}"
                recorder.write(
                    NotRun(variant=target.declaration.ref, dtype=_WITNESS, reason=reason)
                )
        for failure in () if run.files and found.unusable else found.failures:
            for record in _unloadable(failure):
                recorder.write(record)


def _oracle_files() -> dict[str, str]:
    """Name and hash of the files with oracles that are not the package's, if there are any."""
    named = (f"{path.name} {digest(path.read_text(encoding='utf-8'))}" for path in used_files())
    text = ", ".join(named)
    return {"oracles": text} if text else {}


def _record_uncounted(run: CampaignRun, evidence: Evidence) -> None:
    """Count what was drawn by processes that ended before they wrote how much they had drawn."""
    judged = {
        (v.variant, v.dtype, v.group, v.case) for v in evidence.verdicts if v.phase == "generate"
    }
    uncounted = Counter((variant, dtype, group) for variant, dtype, group, _ in judged)
    uncounted.subtract({(d.variant, d.dtype, d.group): d.drawn for d in evidence.drawn})
    with Recorder(run.directory, "campaign") as recorder:
        for (variant, dtype, group), drawn in sorted(uncounted.items()):
            if drawn > 0 and group not in ("loading", GROUP):
                recorder.write(
                    Drawn(variant=variant, dtype=dtype, group=group, drawn=drawn, refused=0)
                )


def _entry(declaration: Declaration) -> VariantEntry:
    return VariantEntry(
        ref=declaration.ref,
        name=declaration.name,
        family=declaration.family,
        path=(
            declaration.path if declaration.ref != declaration.name else published(declaration.path)
        ),
        source_hash=declaration.source_hash,
        configs=tuple(config.name for config in declaration.configs),
        support=asdict(declaration.support),
        numerics=asdict(declaration.numerics),
        contract=asdict(declaration.contract),
        entries=declaration.entries,
        gradients=None if declaration.gradients is None else asdict(declaration.gradients),
        unavailable=declaration.unavailable,
        undeclared=declaration.undeclared,
    )


def _unloadable(failure: Unloadable) -> list[VariantEntry | Verdict]:
    entry = VariantEntry(
        ref=failure.ref,
        name=failure.ref,
        family="unknown",
        path=failure.ref,
        source_hash="",
        configs=(),
        support={},
        numerics={},
        contract={},
    )
    finding = Finding(
        oracle="loading",
        message=f"does not load: {failure.message}",
        replay=f"python -m verify run {failure.ref}",
    )
    verdict = Verdict(
        case=f"{failure.ref}:-:loading:-",
        variant=failure.ref,
        config="-",
        dtype="-",
        oracle="loading",
        group="loading",
        outcome="fail",
        phase="generate",
        problem="-",
        finding=finding,
    )
    return [entry, verdict]


def remember_failures(evidence: Evidence) -> None:
    """Keep the smallest failing cases by id; the next run hears them first."""
    failing = {
        v.case
        for v in evidence.verdicts
        if v.outcome == "fail" and v.group not in ("loading", GROUP)
    }
    if not failing:
        return
    known = state_directory() / _KNOWN
    before = known.read_text(encoding="utf-8").splitlines() if known.exists() else []
    smallest = sorted(failing, key=len)[:50]
    known.write_text("\n".join(dict.fromkeys([*smallest, *before][:200])) + "\n", encoding="utf-8")


def _with_statistics(run: CampaignRun, evidence: Evidence) -> Evidence:
    """Judge the campaign as a whole, and record what is wrong with it.  A failing verdict stands if
    the run goes on."""
    found = findings(evidence.verdicts)
    if not found:
        return evidence
    with Recorder(run.directory, GROUP) as recorder:
        for verdict in found:
            recorder.write(verdict)
    return evidence.with_verdicts(found)


def unusable(run: CampaignRun) -> str | None:
    """In one line, why no kernel file that was given can be tried: a usage error; else None."""
    begun = run.files and (run.directory / _ROSTER).exists()
    return run.roster.unusable if begun else None


def convicted(run: CampaignRun) -> bool:
    """Whether the campaign as a whole fails and no known defect says so, although each of its cases
    may pass."""
    evidence = load(run.directory) if run.directory.exists() else None
    if evidence is None or not evidence.verdicts:
        return False
    return any(v.group == GROUP for v in xfails_in(evidence).unexpected(evidence.verdicts))


def changed(run: CampaignRun) -> str | None:
    """In words, that the judge's files changed during the run; None if they did not."""
    return judge_changed(load(run.directory)) if run.directory.exists() else None


def report(run: CampaignRun, directory: str | Path | None = None) -> str:
    """Judge a run as a whole and `publish` it; returns "" where nothing was judged."""
    evidence = load(run.directory) if run.directory.exists() else None
    if evidence is None or not evidence.verdicts:
        return ""
    evidence = _with_statistics(run, evidence)
    remember_failures(evidence)
    return publish(evidence, run.directory.name, state_directory() / "report", directory)


def publish(
    evidence: Evidence, runs: str, parent: Path, directory: str | Path | None = None
) -> str:
    """Write the accuracy report of evidence; returns a line that says where it is and what it says.

    It is written into a directory, by default one with the name of the device in `parent`.  runs:
    what the evidence is called.
    """
    built = build(evidence, xfails=xfails_in(evidence))
    paths = write(built, directory or parent / str(built["device"]["slug"]))
    told = f"{built['cases']} cases, {built['failures']} failing; run {runs}; report: {paths[-1]}"
    return f"{told}{_other_xfails(evidence)}"


def _other_xfails(evidence: Evidence) -> str:
    """A warning where the known defects are not those that the evidence was recorded with, or not
    those of the file now."""
    before = {run.versions["xfails"] for run in evidence.runs if "xfails" in run.versions}
    if before - {digest(at_start())}:
        return f"\n{FILE} is not the one that the run began with"
    return (
        f"\n{FILE} has changed while this command ran, and counts from the next one on"
        if changed_since()
        else ""
    )
