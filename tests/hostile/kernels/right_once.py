"""Is right only in its first launch.

Must: fail repeat or bound
"""

from hostile_base import declare, right, wrong

CALLS = []


def forward(args, out, lse, workspace):
    CALLS.append(1)
    (right if len(CALLS) == 1 else wrong)(args, out, lse)


VARIANT = declare("right-once", forward)
