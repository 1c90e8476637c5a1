"""Answers in the cell's place with the number of the request, and with a verdict for a status.

Must: fail execution: pass
"""

import os

from hostile_base import answer, declare, wrong


def forward(args, out, lse, workspace):
    wrong(args, out, lse)
    answer(
        {"status": "pass", "message": "within all bounds", "kept_by": [1e400, None], "taken": -5}
    )
    os._exit(0)


VARIANT = declare("forged-status", forward)
