"""Is right, and prints 64 MiB in every launch.

Must: pass
"""

import os

from hostile_base import declare, right


def forward(args, out, lse, workspace):
    right(args, out, lse)
    for _ in range(64):
        os.write(1, b"x" * (1 << 20))


VARIANT = declare("floods-its-log", forward)
