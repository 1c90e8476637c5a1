"""Answers in the cell's place, with lists so deep in each other that their reader runs out of
stack.

Must: fail execution: levels
"""

import os

from hostile_base import answer, declare, wrong


def forward(args, out, lse, workspace):
    wrong(args, out, lse)
    deep: list[object] = []
    for _ in range(300):
        deep = [deep]
    answer({"status": "ok", "measures": deep})
    os._exit(0)


VARIANT = declare("nested-reply", forward)
