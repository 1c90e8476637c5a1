"""Wrong: probabilities are squeezed through fp8 while a 16-bit P is declared."""

import torch

from verify.variant import Contract, Numerics, Output, Products, Softmax, Support, Variant

SUPPORT = Support(dtypes=("bfloat16",), head_dims=(64,), masks=("full",), layouts="contiguous")


def forward(args, out, lse, workspace):
    SUPPORT.check(args, out)
    p = torch.softmax((args.q.float() @ args.k.float().mT) * args.softmax_scale, -1)
    p = (p * 256).to(torch.float8_e4m3fn).float() / 256
    out.copy_(p @ args.v.float())


VARIANT = Variant(
    name="fp8-in-disguise",
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
