"""Answers with a pickle that runs a command in the process that loads it.

Must: fail execution: not JSON
"""

import os
import pickle
import struct

from hostile_base import declare, sockets


class Bomb:
    def __reduce__(self):
        return os._exit, (0,)


def forward(args, out, lse, workspace):
    text = pickle.dumps(Bomb())
    for fd in sockets():
        os.write(fd, struct.pack("<I", len(text)) + text)


VARIANT = declare("pickled-reply", forward)
