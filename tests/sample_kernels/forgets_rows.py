"""Wrong: leaves the last row unwritten when seqlen_q is ragged."""

import torch

from verify.variant import Contract, Numerics, Output, Products, Softmax, Support, Variant

SUPPORT = Support(dtypes=("float32",), head_dims=(64,), masks=("full",), layouts="contiguous")


def forward(args, out, lse, workspace):
    SUPPORT.check(args, out)
    result = torch.softmax((args.q @ args.k.mT) * args.softmax_scale, -1) @ args.v
    rows = args.seqlen_q - (args.seqlen_q % 16 > 0)
    out[:, :, :rows].copy_(result[:, :, :rows])


VARIANT = Variant(
    name="forgetful",
    family="torch",
    forward=forward,
    support=SUPPORT,
    numerics=Numerics(
        products=Products(operands="float32"),
        softmax=Softmax(exp="vexp"),
        output=Output(normalised=True),
    ),
    contract=Contract(lse=None),
)
