"""Judge: which one it was, by the files that decide.  Imports nothing heavy."""

from __future__ import annotations

from hashlib import sha256

from verify.bootstrap import ROOT
from verify.evidence import Evidence


def judge_hash() -> str:
    """Of all that decides here, references included: which judge it was."""
    digest = sha256()
    for path in sorted(path for folder in ("verify", "references") for path in (ROOT / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def judge_changed(evidence: Evidence) -> str | None:
    """In words, that the judge's files are not those that the evidence's last run began with; None if they are."""
    begun = evidence.runs[-1].versions.get("judge") if evidence.runs else None
    now = judge_hash()
    if begun in (None, now):
        return None
    return (
        f"files of verify/ or references/ changed while the run judged (judge {begun} at its start, {now} at its end): "
        "its verdicts are not those of one judge; restore the files and run again"
    )
