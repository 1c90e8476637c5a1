"""Writes into the memory of the process that started it.

Must: fail execution: PermissionError
"""

import os

from hostile_base import declare, wrong


def forward(args, out, lse, workspace):
    wrong(args, out, lse)
    with open(f"/proc/{os.getppid()}/mem", "r+b") as memory:
        memory.seek(0x400000)
        memory.write(b"\0")


VARIANT = declare("looks-into-the-parent", forward)
