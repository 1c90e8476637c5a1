"""Ends in the middle, and leaves a child that answers with its number.

Must: fail bound
"""

import os

from hostile_base import answer, declare, wrong


def forward(args, out, lse, workspace):
    wrong(args, out, lse)
    if os.fork():
        os._exit(0)
    answer({"status": "ok"})
    os._exit(0)


VARIANT = declare("leaves-an-heir", forward)
