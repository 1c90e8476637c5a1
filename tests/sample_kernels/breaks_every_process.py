"""A file whose import breaks a function that the judge's code in the cell needs: no verdict on its
kernel is possible."""

import torch
from breaks_process import SUPPORT, right

from verify.variant import Numerics, Output, Products, Softmax, Variant


def no_attribute(*args, **kwargs):
    raise AttributeError("'NoneType' object has no attribute 'shape'")


torch.full_like = no_attribute
VARIANT = Variant(
    name="unheard",
    family="torch",
    forward=right,
    support=SUPPORT,
    numerics=Numerics(
        products=Products(operands="float32"),
        softmax=Softmax(exp="vexp", block_n=0),
        output=Output(normalised=True),
    ),
    allocates_outputs=True,
)
