"""Ends its process with status 0 in the middle, as if all were done.

Must: fail execution: exited with status 0
"""

import os

from hostile_base import declare, wrong


def forward(args, out, lse, workspace):
    wrong(args, out, lse)
    os._exit(0)


VARIANT = declare("ends-well", forward)
