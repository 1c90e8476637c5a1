"""Is right, and leaves a process behind that has a session of its own, no open files and a parent
that is gone.

Must: pass
"""

import ctypes
import os
import time

from hostile_base import declare, right


def forward(args, out, lse, workspace):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 256)
            ctypes.CDLL(None).prctl(15, b"hostile-orphan", 0, 0, 0)
            time.sleep(120)
        os._exit(0)
    right(args, out, lse)


VARIANT = declare("forks", forward)
