"""Calls itself by a name that a terminal obeys.

Must: not load: name
"""

from hostile_base import declare, right


def forward(args, out, lse, workspace):
    right(args, out, lse)


VARIANT = declare("a\x1b[2J\ud800", forward)
