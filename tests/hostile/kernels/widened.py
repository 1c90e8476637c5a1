"""Declares as many roundings as a declaration can hold, and uses some of the room.

Must: pass, lenient
"""

from hostile_base import declare, right

from verify.variant import Numerics, Output, Products, Softmax


def forward(args, out, lse, workspace):
    right(args, out, lse)
    out.mul_(1 + 4e-7)


VARIANT = declare(
    "widened",
    forward,
    numerics=Numerics(
        products=Products(operands="float32"),
        softmax=Softmax(exp="vexp", scale_roundings=16),
        output=Output(roundings=16),
    ),
)
