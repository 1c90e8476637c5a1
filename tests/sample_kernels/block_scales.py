"""Inputs of 8 bits with one factor for 64 rows of Q, K and V: a right kernel, and kernels that take
a factor of the neighbouring block, or of the key head in place of the query head."""

import math
from dataclasses import replace

import torch

from verify.variant import Contract, Numerics, Output, Products, Softmax, Support, Variant

BLOCK = 64
SUPPORT = Support(
    dtypes=("float8_e4m3fn",),
    head_dims=(16, 32, 64),
    masks=("full", "causal", "lengths"),
    grouped_heads=True,
    descalings=("block64",),
    max_seqlen=1024,
)


def by_row(factors, rows):
    """(batch, heads, blocks) -> (batch, heads, rows, 1)."""
    return factors.repeat_interleave(BLOCK, 2)[:, :, :rows, None]


def right(args, factors):
    return factors


def of_the_next_block(name):
    def moved(args, factors):
        return {**factors, name: factors[name].roll(-1, 2)}

    return moved


def of_the_key_head(args, factors):
    """The first query head of each group stands for all of it."""
    group = args.heads_q // args.heads_kv
    first = torch.arange(args.heads_q) // group * group
    return {**factors, "q": factors["q"][:, first]}


def forward_by(chosen):
    def forward(args, out, lse, workspace):
        SUPPORT.check(args, out)
        given = args.descales
        factors = chosen(args, {"q": given.q, "k": given.k, "v": given.v})
        group = args.heads_q // args.heads_kv
        fq, fk, fv = (
            by_row(factors[name], rows).repeat_interleave(each, 1)
            for name, rows, each in (
                ("q", args.seqlen_q, 1),
                ("k", args.seqlen_kv, group),
                ("v", args.seqlen_kv, group),
            )
        )
        k, v = (x.float().repeat_interleave(group, 1) for x in (args.k, args.v))
        lengths = args.seqlen_q, args.seqlen_kv
        seen = args.mask.dense(args.batch, args.heads_q, *lengths, device=args.q.device)
        s = (args.q.float() @ k.mT) * (args.softmax_scale * fq * fk.mT)
        s = s.masked_fill(~seen, -math.inf)
        top = s.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
        p = torch.exp(s - top)
        total = p.sum(-1, keepdim=True)
        made = torch.zeros(out.shape, device=out.device)
        for at in range(0, args.seqlen_kv, BLOCK):
            part = slice(at, at + BLOCK)
            made = made + (p[..., part] @ v[:, :, part]) * fv[:, :, at : at + 1]
        out.copy_(made / torch.where(total == 0, 1.0, total))
        lse.copy_((top + total.log())[..., 0])

    return forward


RIGHT = Variant(
    name="right",
    family="torch",
    forward=forward_by(right),
    support=SUPPORT,
    numerics=Numerics(
        products=Products(operands="float32", promotion=0),
        softmax=Softmax(exp="vexp", block_n=BLOCK, scale_roundings=3),
        output=Output(probability="float32"),
    ),
    contract=Contract(),
)
WRONG = {
    **{f"{name}-of-the-next-block": of_the_next_block(name) for name in "qkv"},
    "q-of-the-key-head": of_the_key_head,
}
VARIANTS = [RIGHT] + [
    replace(RIGHT, name=name, forward=forward_by(chosen)) for name, chosen in WRONG.items()
]
