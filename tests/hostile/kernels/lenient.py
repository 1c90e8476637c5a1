"""Declares so many roundings that everything is within its bounds.

Must: not load: scale_roundings
"""

from hostile_base import declare, wrong

from verify.variant import Numerics, Output, Softmax


def forward(args, out, lse, workspace):
    wrong(args, out, lse)


VARIANT = declare(
    "lenient",
    forward,
    numerics=Numerics(softmax=Softmax(scale_roundings=20000), output=Output(roundings=20000)),
)
