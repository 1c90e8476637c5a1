"""Stops the process that forks cells, so that no other kernel is ever judged.

Must: fail execution: PermissionError
"""

import os
import signal

from hostile_base import declare, right


def forward(args, out, lse, workspace):
    os.kill(os.getppid(), signal.SIGSTOP)
    right(args, out, lse)


VARIANT = declare("stops-the-server", forward)
