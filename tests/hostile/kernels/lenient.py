"""Declares so many roundings that everything is within its bounds.

Must: not load: scale_roundings
"""

from hostile_base import declare, wrong

from verify.variant import Numerics


def forward(args, out, lse, workspace):
    wrong(args, out, lse)


VARIANT = declare(
    "lenient", forward, numerics=Numerics(scale_roundings=20000, output_roundings=20000)
)
