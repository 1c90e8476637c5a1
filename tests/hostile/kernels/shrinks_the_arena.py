"""Makes the arena's file shorter, so that the judge dies of a bus error at its next look.

Must: fail execution: PermissionError
"""

import os

from hostile_base import declare, right


def forward(args, out, lse, workspace):
    right(args, out, lse)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        line = next(line for line in maps if "attention-verify" in line)
    fd = os.open("/proc/self/map_files/" + line.split()[0], os.O_RDWR)
    os.ftruncate(fd, 0)


VARIANT = declare("shrinks-the-arena", forward)
