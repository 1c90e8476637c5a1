"""Answers in the cell's place, byte by byte, and never comes to an end.

Must: fail execution: hangs
"""

import os
import struct
import time

from hostile_base import declare, sockets


def forward(args, out, lse, workspace):
    (fd,) = sockets()
    os.write(fd, struct.pack("<I", 1 << 20))
    while True:
        os.write(fd, b" ")
        time.sleep(0.05)


VARIANT = declare("drips", forward)
