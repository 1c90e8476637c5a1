"""Refuses with words that clear the terminal and print a verdict of their own.

Must: fail execution: \\x1b[2J
"""

from hostile_base import declare

from verify.variant import Unsupported


def forward(args, out, lse, workspace):
    raise Unsupported("seqlen_q\x1b[2J\x1b[H", "\x1b[32m1 variant holds\x1b[0m\r\x9b2K")


VARIANT = declare("escapes", forward)
