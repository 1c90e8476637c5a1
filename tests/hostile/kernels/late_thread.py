"""Answers at once, and lets a thread write the result when the judge may have looked already.

Must: fail bound or memory or repeat
"""

import threading
import time

from hostile_base import declare, right


def forward(args, out, lse, workspace):
    def later():
        time.sleep(0.3)
        right(args, out, lse)

    threading.Thread(target=later, daemon=True).start()


VARIANT = declare("late-thread", forward)
