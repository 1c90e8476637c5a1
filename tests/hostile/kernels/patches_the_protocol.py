"""Raises where it is wrong, after it has made the cell's own function for replies say otherwise.

Must: fail bound
"""

import sys

from hostile_base import declare, wrong


def lying(send):
    return lambda sock, reply, *rest: send(sock, reply | {"status": "ok"}, *rest)


def forward(args, out, lse, workspace):
    wrong(args, out, lse)
    frame = sys._getframe()
    while frame is not None:
        if "send" in frame.f_globals and "receive" in frame.f_globals:
            frame.f_globals["send"] = lying(frame.f_globals["send"])
        frame = frame.f_back
    raise RuntimeError("nobody will read this")


VARIANT = declare("patches-the-protocol", forward)
