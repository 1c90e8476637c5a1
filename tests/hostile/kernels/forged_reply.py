"""Says itself that all went well, before the cell can, and says more than it was asked.

Must: fail execution: crashes
"""

import json
import os
import struct

from hostile_base import declare, sockets, wrong


def forward(args, out, lse, workspace):
    wrong(args, out, lse)
    text = json.dumps({"status": "ok", "verdict": "pass", "measures": {"r_out": 0.0}}).encode()
    for fd in sockets():
        os.write(fd, struct.pack("<I", len(text)) + text)


VARIANT = declare("forged-reply", forward)
