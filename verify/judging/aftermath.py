"""Aftermath: a launch that fails in a process that other launches had used, and works where nothing
has run.

Something in the file breaks the process.  The variant whose launch met it is not to blame while
others of the same file had run there; then the verdict is on the file.  Where nothing had run there
either, only what other processes can bring about is repeated, and it convicts nobody.
"""

from __future__ import annotations

from verify.evidence import Finding, Outcome
from verify.judging.findings import Ruling
from verify.judging.history import Aftermath, hangs, judges

ORACLE = "aftermath"


def ruling(found: Aftermath) -> Ruling:
    """What is held against the file; nothing is, for an exception in the judge's own code, but it
    is on record."""
    reply, before = found.reply, found.before
    where = "in the judge's own code of the cell" if judges(reply) else "in the kernel"
    words = {
        "raised": f"raises {where}",
        "crash": "crashes",
        "hang": "hangs",
        "out of memory": "runs out of memory",
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
    """A failure, but of no kernel where the judge's own code raised, where memory ran out that
    others share, or where a deadline passed once in a process in which nothing had run before."""
    once = hangs(found.reply) and found.first
    nobodys = judges(found.reply) or found.reply.status == "out of memory" or once
    return "inapplicable" if nobodys else "fail"


def blamed(found: Aftermath, variant: str, path: str) -> str:
    """The variant, where no other had run in that process; else its file, which a report lists like
    a variant."""
    if found.before.variants <= {variant}:
        return variant
    file, at, _ = variant.rpartition("@")
    return file if at else path
