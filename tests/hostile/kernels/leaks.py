"""Is right, and keeps a quarter of a GiB of every call.

Must: pass, memory_growth
"""

from hostile_base import declare, right

KEPT = []


def forward(args, out, lse, workspace):
    KEPT.append(bytearray(b"x" * (256 << 20)))
    right(args, out, lse)


VARIANT = declare("leaks", forward)
