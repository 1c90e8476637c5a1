"""P in the other 16-bit format than the inputs': right kernels, with V converted or not, and wrong
ones: a V that is converted in secret, and a P in fewer bits than declared."""

import math
from dataclasses import replace

import torch

from verify.variant import Contract, Numerics, Output, Products, Softmax, Support, Variant

HALVES = Support(
    dtypes=("bfloat16",),
    head_dims=(16, 64),
    masks=("full", "causal", "lengths"),
    grouped_heads=True,
)
TO_BF16 = replace(HALVES, dtypes=("float16",))


def forward_by(support, kept, converted):
    """kept: dtype of P; converted: that of V as it is multiplied."""

    def forward(args, out, lse, workspace):
        support.check(args, out)
        group = args.heads_q // args.heads_kv
        k, v = (t.repeat_interleave(group, 1) for t in (args.k, args.v))
        seen = args.mask.dense(
            args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv, device=args.q.device
        )
        s = (args.q.float() @ k.float().mT * args.softmax_scale).masked_fill(~seen, -math.inf)
        top = s.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
        p = torch.exp(s - top)
        total = p.sum(-1, keepdim=True)
        made = p.to(kept).float() @ v.to(converted).float()
        out.copy_(torch.where(total == 0, 0.0, made / total))
        lse.copy_((top + total.log())[..., 0])

    return forward


NUMERICS = Numerics(
    products=Products(operands="float32"),
    softmax=Softmax(exp="vexp", block_n=0),
    output=Output(probability="float16"),
)
RIGHT = Variant(
    name="right",
    family="torch",
    forward=forward_by(HALVES, torch.float16, torch.float16),
    support=HALVES,
    numerics=NUMERICS,
    contract=Contract(),
)
TO_FLOAT = replace(
    RIGHT,
    name="values-as-they-are",
    forward=forward_by(TO_BF16, torch.bfloat16, torch.float32),
    support=TO_BF16,
    numerics=replace(NUMERICS, output=Output(probability="bfloat16", values="input")),
)
VARIANTS = [
    RIGHT,
    TO_FLOAT,
    replace(
        TO_FLOAT,
        name="both-in-bfloat16",
        forward=forward_by(TO_BF16, torch.bfloat16, torch.bfloat16),
        numerics=replace(NUMERICS, output=Output(probability="bfloat16")),
    ),
    replace(
        TO_FLOAT,
        name="converts-in-secret",
        forward=forward_by(TO_BF16, torch.bfloat16, torch.bfloat16),
    ),
    replace(
        RIGHT, name="rounds-to-bfloat16", forward=forward_by(HALVES, torch.bfloat16, torch.float32)
    ),
]
