"""Widens its declaration behind the checks of its fields.

Must: not load: scale_roundings
"""

from hostile_base import declare, wrong


def forward(args, out, lse, workspace):
    wrong(args, out, lse)


VARIANT = declare("patched-declaration", forward)
object.__setattr__(VARIANT.numerics.softmax, "scale_roundings", 10**9)
