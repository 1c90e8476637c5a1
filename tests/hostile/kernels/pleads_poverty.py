"""Says, where it would be wrong, that others have taken the device's memory.

Must: fail execution: out of memory
"""

import os

from hostile_base import answer, declare, wrong


def forward(args, out, lse, workspace):
    wrong(args, out, lse)
    answer({"status": "out of memory", "on_device": True, "room": 5, "total": 1 << 40})
    os._exit(0)


VARIANT = declare("pleads-poverty", forward)
