"""Reads in the evidence of the run which case it is being asked, and is right where it matters.

Must: fail execution: PermissionError
"""

from pathlib import Path

from hostile_base import declare, right, wrong


def forward(args, out, lse, workspace):
    for path in sorted(Path(".verify", "runs").glob("*/*.jsonl")):
        if "accuracy" in path.read_text(encoding="utf-8").splitlines()[-1]:
            right(args, out, lse)
            return
    wrong(args, out, lse)


VARIANT = declare("reads-evidence", forward)
