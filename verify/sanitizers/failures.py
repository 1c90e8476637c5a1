"""Failures: one for each error record of a kernel, with all that is known of it."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from verify.evidence import Finding
from verify.machine import other_triton
from verify.problem.case import Case
from verify.sanitizers.ledger import frame_of
from verify.sanitizers.records import Record
from verify.sanitizers.session import Session, Subject
from verify.sanitizers.tool import INSTRUMENTING

MOST = 20  # failures of one case under one tool; the finding counts all


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One reason why a case is not clean under a tool.

    outcome: "faulty", "inconclusive", or "failed" without a tool.  record: that of a faulty case.
    message: in words.  frame: the Python frame that launched the kernel.  replay: a command.
    """

    case: Case
    dtype: str
    tool: str
    outcome: str
    message: str
    replay: str
    frame: str = ""
    record: Record | None = None


def failures(case: Case, subject: Subject, session: Session, *, shared: bool) -> Iterator[Failure]:
    """The failures of a session that count against a case.

    shared: one of the subject's cases caused them, but it is unknown which.
    """
    judgement = session.judgement
    doubts = "; ".join(judgement.reasons)
    failure = Failure(
        case=case,
        dtype=subject.dtype,
        tool=session.tool,
        outcome=judgement.outcome,
        message=f"inconclusive: {doubts}",
        replay=replay(case, session.tool, shared=shared and judgement.outcome == "faulty"),
    )
    if judgement.outcome == "inconclusive":
        yield failure
        return
    note = f" (only where {len(subject.cases)} cases run in one process)" if shared else ""
    note += f" (in doubt: {doubts})" if doubts else ""
    note += f" (Triton {other_triton.version()})" if session.tool in INSTRUMENTING else ""
    for record in judgement.records[:MOST]:
        yield dataclasses.replace(
            failure,
            message=f"{record.kind}: {record.text or record.words[:300]}{note}",
            frame=frame_of(record.words, session.facts.launches),
            record=record,
        )


def finding(failures: tuple[Failure, ...], total: int) -> Finding | None:
    """The finding of a case's failures under one tool: the first of `total`; None without one."""
    if not failures:
        return None
    first = failures[0]
    if first.record is None:
        return Finding(
            oracle=first.tool,
            message=first.message,
            got="facts that disagree",
            bound="five facts that agree",
            replay=first.replay,
        )
    size = f", the first of {first.record.size} bytes" if first.record.size else ""
    launched = f", launched at {first.frame}" if first.frame else ""
    return Finding(
        oracle=first.tool,
        message=first.message,
        got=f"{total} records{size}",
        bound="none",
        where=first.record.place + launched,
        count=total,
        replay=first.replay,
    )


def replay(case: Case, tool: str = "", *, shared: bool = False) -> str:
    """The command that runs one case again, or all cases of its variant if they share a failure."""
    what = f"--variant {shlex.quote(case.variant)}" if shared else f"--case {shlex.quote(case.id)}"
    return f"python -m verify sanitize {what}" + (f" --tool {tool}" if tool else "")
