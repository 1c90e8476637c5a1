"""Says, where it would be wrong, that the device takes no further process.

Must: fail execution: device busy
"""

import os

from hostile_base import answer, declare, wrong


def forward(args, out, lse, workspace):
    wrong(args, out, lse)
    answer({"status": "device busy", "message": "busy or unavailable", "on_device": True})
    os._exit(0)


VARIANT = declare("pleads-busy", forward)
