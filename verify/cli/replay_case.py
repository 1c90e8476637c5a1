"""Replay: judge one case again, from its id alone; and after the cases that its process had run, if
it holds alone.

What it ends with, and its exit code:

    FAILED          1   it fails, alone or after those cases FIXED           0   it failed on
    record; the kernel or the judge has changed since, and it holds both ways HOLDS           0   it
    holds, and no run in this directory has recorded that it failed NOT REPRODUCED  3   it failed on
    record, nothing has changed, and it holds both ways
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from verify.campaign.admission import too_large, unanswerable
from verify.campaign.judge import Judge
from verify.campaign.run import CampaignRun, open_run
from verify.campaign.runner import CLEAN, FAILED, INFRASTRUCTURE, USAGE, say
from verify.campaign.targets import Target, excludes_here
from verify.cell.process import InfrastructureError
from verify.evidence import INAPPLICABLE, Verdict, strict_json
from verify.evidence.explanation import explain
from verify.evidence.judge_version import judge_hash
from verify.machine.places import state_directory
from verify.oracles import groups
from verify.problem.case import Case, CaseError


def replay(case: Case, console: Console) -> int:
    """Hear the case in a run of its own; returns an exit code.  A case that cannot be asked is one
    line and USAGE."""
    if case.group == "sanitizer":
        from verify.cli.sanitize import Request, sanitize

        return sanitize(Request(case=case), console)
    file, at, _ = case.variant.rpartition("@")
    reason = _nonsense(case, Path(file) if at else None)
    if reason is not None:
        say(console, f"verify: {reason}")
        return USAGE
    run = open_run("dev", [Path(file)] if at else [])
    if at and run.roster.unusable:
        say(console, f"verify: {run.roster.unusable}")
        return USAGE
    target = _target(run, case, console)
    if isinstance(target, int):
        return target
    # before this replay leaves a record of its own
    recorded = _recorded(case.id, target.declaration.ref)
    judge = run.judge("replay")
    try:
        return _heard(judge, run, target, case, recorded, console)
    except InfrastructureError as error:
        say(console, f"verify: {error}")
        return INFRASTRUCTURE
    finally:
        judge.close()


def _nonsense(case: Case, file: Path | None) -> str | None:
    """Why no kernel need be loaded to see that the case cannot be asked, or None."""
    if file is not None and not file.is_file():
        return f"no such kernel file: {file}"
    if case.group not in groups():
        return f"unknown group {case.group!r} (groups: {', '.join(groups())})"
    return too_large(case.problem)


def _target(run: CampaignRun, case: Case, console: Console) -> Target | int:
    """The target that hears the case, or an exit code where there is none, and why is said."""
    known = {declaration.ref: declaration for declaration in run.roster.declarations}
    if case.variant not in known:
        say(
            console, f"verify: unknown variant {case.variant!r} (known: {', '.join(sorted(known))})"
        )
        return USAGE
    reason = excludes_here(known[case.variant])
    if reason is not None:
        say(console, f"verify: {case.variant} cannot run here: {reason}")
        return INFRASTRUCTURE
    target = run.target_of(case)
    if target is None:
        names = ", ".join(config.name for config in known[case.variant].configs)
        say(console, f"verify: {case.variant} has no config {case.config!r} (configs: {names})")
        return USAGE
    reason = unanswerable(target, case.problem)
    if reason is not None:
        say(console, f"verify: {case.variant}: {reason}")
        return USAGE
    return target


def _heard(
    judge: Judge,
    run: CampaignRun,
    target: Target,
    case: Case,
    recorded: Recorded | None,
    console: Console,
) -> int:
    """Alone, then after what its process had run when it failed."""
    if _fails(judge.judge(target, case.problem, "witness"), console):
        return _said(console, "FAILED", FAILED)
    if recorded is None:
        return _said(
            console, "HOLDS", CLEAN, "no run in this directory has recorded that it failed"
        )
    tried = "in a fresh process"
    if recorded.before:
        pairs = [(run.target_of(before), before.problem) for before in _cases(recorded.before)]
        console.print(
            f"holds {tried}; again after {_counted(recorded)} that had run before it",
            highlight=False,
        )
        judge.alone(target.declaration)
        for other, problem in pairs:
            if other is not None and unanswerable(other, problem) is None:
                judge.judge(other, problem, "witness")
        if _fails(judge.judge(target, case.problem, "witness"), console):
            return _said(
                console,
                "FAILED",
                FAILED,
                f"after {_counted(recorded)} in the same process, not alone",
            )
        tried = f"{tried}, nor after {_counted(recorded)} that had run before it"
    if recorded.changed(target):
        return _said(console, "FIXED", CLEAN, "the kernel or the judge has changed since it failed")
    return _said(
        console,
        "NOT REPRODUCED",
        INFRASTRUCTURE,
        f"{tried}; the same kernel failed it in run {recorded.run}: a race, or memory that it did"
        " not write",
    )


def _fails(verdicts: list[Verdict], console: Console) -> bool:
    for verdict in verdicts:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in verdict.measures.items())
        said = verdict.observed.get(INAPPLICABLE, numbers)
        console.print(
            f"{verdict.outcome:12} {verdict.oracle:12} {said}", markup=False, highlight=False
        )
    failed = [verdict for verdict in verdicts if verdict.outcome == "fail"]
    for verdict in failed:
        say(console, f"\n{explain(verdict)}")
    return bool(failed)


def _said(console: Console, word: str, status: int, why: str = "") -> int:
    style = "bold green" if status == CLEAN else "bold red"
    console.print(
        f"{word}: {why}" if why else word,
        style=style,
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return status


# What earlier runs of this directory say of a case.


@dataclass(frozen=True)
class Recorded:
    """A failing verdict on record.  before, count: see `Finding`.  source, judge: hashes; "" if not
    on record."""

    run: str
    before: tuple[str, ...]
    count: int
    source: str
    judge: str

    def changed(self, target: Target) -> bool:
        """Whether another kernel, or another judge, failed it."""
        return self.source != target.declaration.source_hash or self.judge != judge_hash()


def _recorded(case: str, variant: str) -> Recorded | None:
    """The newest failing verdict on that case in this directory's runs; one that names cases before
    it, if there is any."""
    folders = [path for path in (state_directory() / "runs").glob("*") if path.is_dir()]
    found: Recorded | None = None
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True):
        one = _recorded_in(folder, case, variant)
        if one is not None and one.before:
            return one
        found = found or one
    return found


def _recorded_in(folder: Path, case: str, variant: str) -> Recorded | None:
    failing = [
        line for line in _lines(folder, case, '"outcome":"fail"') if line.get("case") == case
    ]
    if not failing:
        return None
    findings = [verdict.get("finding") or {} for verdict in failing]
    most = max(findings, key=lambda finding: len(finding.get("before", ())))
    entries = [
        line for line in _lines(folder, variant, '"kind":"variant"') if line.get("ref") == variant
    ]
    runs = list(_lines(folder, '"kind":"run"'))
    return Recorded(
        run=folder.name,
        before=tuple(str(one) for one in most.get("before", ())),
        count=int(most.get("before_count", 0)),
        source=str(entries[-1].get("source_hash")) if entries else "",
        judge=str(runs[-1].get("versions", {}).get("judge")) if runs else "",
    )


def _lines(folder: Path, *words: str) -> Iterator[dict[str, Any]]:
    """The records of a run whose lines hold all these words; what does not parse was cut short."""
    for file in sorted(folder.glob("*.jsonl")):
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if all(word in line for word in words):
                    try:
                        data = strict_json.loads(line)
                    except ValueError:
                        continue
                    if isinstance(data, dict):
                        yield data


def _cases(ids: tuple[str, ...]) -> Iterator[Case]:
    for text in ids:
        try:
            yield Case.parse(text)
        except CaseError:  # of an earlier version
            continue


def _counted(recorded: Recorded) -> str:
    kept = len(recorded.before)
    if recorded.count > kept:
        return f"the last {kept} of {recorded.count} cases"
    return f"{kept} case{'s' * (kept > 1)}"
