"""Replay: judges one case again, by its id.

First it judges the case alone in a fresh process.  If it passes, and a failure is on record, it
judges the case again after the cases that had run before it in its process.  The result and the
exit code are:

- FAILED, 1: it fails, alone or after those cases.
- FIXED, 0: it failed on record and passes both ways; the kernel or the judge has changed since.
- HOLDS, 0: it passes, and no run in this directory has recorded that it failed.
- NOT REPRODUCED, 3: it failed on record and passes both ways, and nothing has changed.
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
from verify.campaign.runner import CLEAN, FAILED, INFRASTRUCTURE, USAGE, RunnerError, say
from verify.campaign.targets import Target, excludes_here
from verify.cell.process import InfrastructureError
from verify.evidence import INAPPLICABLE, Verdict, strict_json
from verify.evidence.explanation import explain
from verify.evidence.judge_version import judge_hash
from verify.machine.places import state_directory
from verify.oracles import groups
from verify.problem.case import Case, CaseError


def replay(case: Case, console: Console) -> int:
    """Judge the case in a new run; returns an exit code.

    For a case that cannot be asked it prints one line and returns USAGE.
    """
    if case.group == "sanitizer":
        from verify.cli.sanitize import sanitize
        from verify.cli.sanitize_choice import Request

        return sanitize(Request(case=case), console)
    file, at, _ = case.variant.rpartition("@")
    reason = _refusal(case, Path(file) if at else None)
    if reason is not None:
        say(console, f"verify: {reason}")
        return USAGE
    run = open_run("dev", [Path(file)] if at else [])
    if at and run.roster.unusable:
        say(console, f"verify: {run.roster.unusable}")
        return USAGE
    if at and run.roster.lacking:
        raise RunnerError(run.roster.lacking)
    target = _target(run, case, console)
    if isinstance(target, int):
        return target
    # Read before this replay writes its own records.
    recorded = _recorded(case.id, target.declaration.ref)
    judge = run.judge("replay")
    try:
        return _judge_again(judge, run, target, case, recorded, console)
    except InfrastructureError as error:
        say(console, f"verify: {error}")
        return INFRASTRUCTURE
    finally:
        judge.close()


def _refusal(case: Case, file: Path | None) -> str | None:
    """Why the case cannot be asked, as far as that is known without loading a kernel; or None."""
    if file is not None and not file.is_file():
        return f"no such kernel file: {file}"
    if case.group not in groups():
        return f"unknown group {case.group!r} (groups: {', '.join(groups())})"
    return too_large(case.problem)


def _target(run: CampaignRun, case: Case, console: Console) -> Target | int:
    """The case's target; if there is none, print why and return an exit code."""
    declarations = {declaration.ref: declaration for declaration in run.roster.declarations}
    if case.variant not in declarations:
        say(
            console,
            f"verify: unknown variant {case.variant!r} (known: {', '.join(sorted(declarations))})",
        )
        return USAGE
    reason = excludes_here(declarations[case.variant])
    if reason is not None:
        say(console, f"verify: {case.variant} cannot run here: {reason}")
        return INFRASTRUCTURE
    try:
        config = declarations[case.variant].config(case.config)
    except KeyError as error:
        say(console, f"verify: {error.args[0]}")
        return USAGE
    target = Target(declarations[case.variant], config, case.problem.dtype, case.group)
    reason = unanswerable(target, case.problem)
    if reason is not None:
        say(console, f"verify: {case.variant}: {reason}")
        return USAGE
    return target


def _judge_again(
    judge: Judge,
    run: CampaignRun,
    target: Target,
    case: Case,
    recorded: Recorded | None,
    console: Console,
) -> int:
    """Judge the case alone, then after the cases that its process had run when it failed; returns
    an exit code."""
    if _fails(judge.judge(target, case.problem, "witness"), console):
        return _ends(console, "FAILED", FAILED)
    if recorded is None:
        return _ends(
            console, "HOLDS", CLEAN, "no run in this directory has recorded that it failed"
        )
    tried = "in a fresh process"
    if recorded.before:
        pairs = [(run.target_of(before), before.problem) for before in _cases(recorded.before)]
        console.print(
            f"holds {tried}; again after {_counted(recorded)} that had run before it",
            highlight=False,
        )
        judge.restart_process(target.declaration)
        for other, problem in pairs:
            if other is not None and unanswerable(other, problem) is None:
                judge.judge(other, problem, "witness")
        if _fails(judge.judge(target, case.problem, "witness"), console):
            return _ends(
                console,
                "FAILED",
                FAILED,
                f"after {_counted(recorded)} in the same process, not alone",
            )
        tried = f"{tried}, nor after {_counted(recorded)} that had run before it"
    if recorded.changed(target):
        return _ends(console, "FIXED", CLEAN, "the kernel or the judge has changed since it failed")
    return _ends(
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


def _ends(console: Console, word: str, status: int, why: str = "") -> int:
    style = "bold green" if status == CLEAN else "bold red"
    console.print(
        f"{word}: {why}" if why else word,
        style=style,
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return status


# Records of earlier runs in this directory.


@dataclass(frozen=True)
class Recorded:
    """A failing verdict on record.

    before, count: see `Finding`.  source, judge: hashes; "" if not on record.
    """

    run: str
    before: tuple[str, ...]
    count: int
    source: str
    judge: str

    def changed(self, target: Target) -> bool:
        """Whether the kernel or the judge has changed since."""
        return self.source != target.declaration.source_hash or self.judge != judge_hash()


def _recorded(case: str, variant: str) -> Recorded | None:
    """The newest failing verdict on that case in this directory's runs; preferably one that names
    cases before it."""
    folders = [path for path in (state_directory() / "runs").glob("*") if path.is_dir()]
    newest: Recorded | None = None
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True):
        one = _recorded_in(folder, case, variant)
        if one is not None and one.before:
            return one
        newest = newest or one
    return newest


def _recorded_in(folder: Path, case: str, variant: str) -> Recorded | None:
    failing = [
        line for line in _lines(folder, case, '"outcome":"fail"') if line.get("case") == case
    ]
    if not failing:
        return None
    findings = [verdict.get("finding") or {} for verdict in failing]
    longest = max(findings, key=lambda finding: len(finding.get("before", ())))
    entries = [
        line for line in _lines(folder, variant, '"kind":"variant"') if line.get("ref") == variant
    ]
    runs = list(_lines(folder, '"kind":"run"'))
    return Recorded(
        run=folder.name,
        before=tuple(str(one) for one in longest.get("before", ())),
        count=int(longest.get("before_count", 0)),
        source=str(entries[-1].get("source_hash")) if entries else "",
        judge=str(runs[-1].get("versions", {}).get("judge")) if runs else "",
    )


def _lines(folder: Path, *words: str) -> Iterator[dict[str, Any]]:
    """The records of a run whose lines hold all these words; incomplete lines are skipped."""
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
        except CaseError:  # written by an earlier version
            continue


def _counted(recorded: Recorded) -> str:
    count = len(recorded.before)
    if recorded.count > count:
        return f"the last {count} of {recorded.count} cases"
    return f"{count} case{'s' * (count > 1)}"
