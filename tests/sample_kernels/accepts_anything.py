"""Wrong: declares head_dim 64 but answers, wrongly, for others."""

import torch

from verify.variant import Contract, Numerics, Output, Products, Softmax, Support, Variant


def forward(args, out, lse, workspace):
    out.copy_(torch.softmax((args.q @ args.k.mT) * 0.125, -1) @ args.v)


VARIANT = Variant(
    name="accepts-anything",
    family="torch",
    forward=forward,
    support=Support(
        dtypes=("float32",),
        head_dims=(64,),
        masks=("full",),
        layouts="contiguous",
        scales="default",
    ),
    numerics=Numerics(
        products=Products(operands="float32"),
        softmax=Softmax(exp="vexp"),
        output=Output(normalised=True),
    ),
    contract=Contract(lse=None),
)
