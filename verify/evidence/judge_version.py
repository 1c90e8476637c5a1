"""Judge: which one it was, by the files that decide.  Imports nothing heavy."""

from __future__ import annotations

from hashlib import sha256

from verify.bundle import judge_sources
from verify.evidence import Evidence


def judge_hash() -> str:
    """Of all that decides here, references included: which judge it was."""
    digest = sha256()
    for name, path in judge_sources().items():
        digest.update(f"{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def judge_changed(evidence: Evidence) -> str | None:
    """In words, that the judge's files are not those that the evidence's last run began with; None
    if they are."""
    begun = evidence.runs[-1].versions.get("judge") if evidence.runs else None
    now = judge_hash()
    if begun in (None, now):
        return None
    return (
        f"files of verify/ or references/ changed while the run judged (judge {begun} at its start,"
        f" {now} at its end): its verdicts are not those of one judge; restore the files and run"
        " again"
    )
