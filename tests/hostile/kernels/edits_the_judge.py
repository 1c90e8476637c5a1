"""Makes every bound infinite in the judge's own source, for the next run.

Must: not load: PermissionError
"""

import inspect
from pathlib import Path

from hostile_base import declare, wrong

import verify.variant

path = Path(inspect.getfile(verify.variant)).parents[1] / "tolerance" / "forward.py"
with path.open("a", encoding="utf-8") as file:
    file.write("\nbound = lambda *a, **k: float('inf')\n")


def forward(args, out, lse, workspace):
    wrong(args, out, lse)


VARIANT = declare("edits-the-judge", forward)
