"""Aftermath: a launch fails in a process that earlier launches had used, and works in a fresh one.

Something in the kernel file breaks the process.  If other variants of the file had run there, the
verdict is on the file and not on the variant that failed.  The first launch of a process is
repeated only for failures that other causes can have (a hang, exhausted memory, the judge's own
code); its aftermath convicts no kernel.
"""

from __future__ import annotations

from verify.evidence import Finding, Outcome
from verify.judging.findings import Ruling
from verify.judging.history import Aftermath, hangs, judges

ORACLE = "aftermath"


def ruling(found: Aftermath) -> Ruling:
    """The ruling with its finding.  `outcome` decides whether it convicts: an exception in the
    judge's own code is only recorded."""
    reply, before = found.reply, found.before
    where = "in the judge's own code of the cell" if judges(reply) else "in the kernel"
    words = {
        "raised": f"raises {where}",
        "crash": "crashes",
        "hang": "hangs",
        "out of memory": "runs out of memory",
        "device busy": "is not let onto the GPU",
    }
    used = "in a process that earlier launches had used, and works in a fresh one"
    trace = str(reply.data.get("traceback", ""))
    message = (
        f"{words.get(reply.status, reply.status)} "
        f"{'in a fresh process, and works in another one' if found.first else used}: "
        f"{before.told}: {reply.message}" + (f"\n{trace}" if trace else "")
    )
    finding = Finding(
        oracle=ORACLE,
        message=message,
        got=reply.status,
        bound="the same as in a fresh process",
        before=before.cases,
        before_count=before.count,
    )
    return Ruling(finding)


def outcome(found: Aftermath) -> Outcome:
    """The outcome "fail", or "inapplicable" if no kernel is the cause: the judge's own code raised,
    others had the memory or the GPU, or the first launch of a process once passed its deadline."""
    once = hangs(found.reply) and found.first
    innocent = judges(found.reply) or found.reply.crowded or once
    return "inapplicable" if innocent else "fail"


def blamed(found: Aftermath, variant: str, path: str) -> str:
    """The variant if no other variant had run in that process, or others had the memory or the GPU;
    else its file, which a report then lists like a variant."""
    if found.reply.crowded or found.before.variants <= {variant}:
        return variant
    file, at, _ = variant.rpartition("@")
    return file if at else path
