"""Wrong: writes one element past the end of its output."""

import torch

from verify.variant import Contract, Numerics, Output, Products, Softmax, Support, Variant

SUPPORT = Support(dtypes=("float32",), head_dims=(64,), masks=("full",), layouts="contiguous")


def forward(args, out, lse, workspace):
    SUPPORT.check(args, out)
    out.copy_(torch.softmax((args.q @ args.k.mT) * args.softmax_scale, -1) @ args.v)
    if args.seqlen_q % 2:
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(1.0)


VARIANT = Variant(
    name="one-past-the-end",
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
