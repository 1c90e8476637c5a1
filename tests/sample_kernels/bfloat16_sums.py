"""Sums in bfloat16: right kernels that declare it, rounded after every product or every block of
keys, and wrong ones: rounded more often than declared, or declared to be fp32."""

import math
from dataclasses import replace

import torch

from verify.variant import (
    Contract,
    GradientNumerics,
    GradientProducts,
    GradientSoftmax,
    GradientSums,
    Numerics,
    Output,
    Products,
    ScoreGradient,
    Softmax,
    Support,
    Variant,
)

SUPPORT = Support(
    dtypes=("bfloat16", "float32"),
    head_dims=(16, 64),
    masks=("full", "causal", "lengths"),
    grouped_heads=True,
    max_seqlen=1024,  # a step for each product takes long
)
BLOCK = 256


def kept(x):
    return x.bfloat16().float()


def by_product(a, b, start=None):
    """start + a @ b, rounded to bfloat16 after every product."""
    total = a.new_zeros(*a.shape[:-1], b.shape[-1]) if start is None else start
    for n in range(a.shape[-1]):
        total = kept(total + a[..., n, None] * b[..., n, None, :])
    return total


def by_block(a, b, start=None):
    """The same, rounded once."""
    return kept(a @ b) if start is None else kept(start + a @ b)


def scores_of(args, product):
    group = args.heads_q // args.heads_kv
    k, v = (t.float().repeat_interleave(group, 1) for t in (args.k, args.v))
    seen = args.mask.dense(
        args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv, device=args.q.device
    )
    s = product(args.q.float(), k.mT) * args.softmax_scale
    return s.masked_fill(~seen, -math.inf), seen, k, v


def forward_by(product):
    def forward(args, out, lse, workspace):
        SUPPORT.check(args, out)
        s, _, _, v = scores_of(args, product)
        top = s.new_full((*s.shape[:3], 1), torch.finfo(torch.float32).min)
        total, made = torch.zeros_like(top), s.new_zeros(*s.shape[:3], v.shape[-1])
        for at in range(0, args.seqlen_kv, BLOCK):
            part = s[..., at : at + BLOCK]
            new = torch.maximum(top, part.amax(-1, keepdim=True))
            shrink, p = torch.exp(top - new), torch.exp(part - new)
            total, top = total * shrink + p.sum(-1, keepdim=True), new
            made = product(p, v[:, :, at : at + BLOCK], kept(made * shrink))
        out.copy_(torch.where(total == 0, 0.0, made / total))
        lse.copy_((top + total.log())[..., 0])

    return forward


def backward_by(product):
    def backward(args, saved, dout, gradients, workspace):
        SUPPORT.check_backward(args, saved, dout, gradients)
        s, seen, k, v = scores_of(args, product)
        dout = dout.float()
        delta = (dout * saved.out.float()).sum(-1, keepdim=True)
        lse = saved.lse[..., None]
        p = torch.where(seen, torch.exp(s - torch.where(lse == -math.inf, math.inf, lse)), 0.0)
        ds = torch.where(seen, p * (product(dout, v.mT) - delta), 0.0)
        group, rows = args.heads_q // args.heads_kv, (1, (-1, args.heads_q // args.heads_kv))

        def over_group(weights, operand):
            total = None
            weights, operand = (x.unflatten(*rows) for x in (weights.mT, operand))
            for head in range(group):
                total = product(weights[:, :, head], operand[:, :, head], total)
            return total

        dq = product(ds, k) * args.softmax_scale
        dk = over_group(ds, args.q.float()) * args.softmax_scale
        gradients.copy_(dq, dk, over_group(p, dout))

    return backward


BY_PRODUCT = Numerics(
    products=Products(operands="float32", accumulator="bfloat16"),
    softmax=Softmax(exp="vexp", block_n=BLOCK),
    output=Output(probability="float32"),
)
RIGHT = Variant(
    name="right",
    family="torch",
    forward=forward_by(by_product),
    backward=backward_by(by_product),
    support=SUPPORT,
    numerics=BY_PRODUCT,
    gradients=GradientNumerics(
        products=GradientProducts(operands="float32", accumulator="bfloat16"),
        softmax=GradientSoftmax(exp="vexp", probability="float32"),
        score_gradient=ScoreGradient(dtype="float32"),
        sums=GradientSums(block_m=0, block_n=0),
    ),
    contract=Contract(),
)
BLOCKS = replace(
    RIGHT,
    name="right-by-block",
    forward=forward_by(by_block),
    backward=None,
    gradients=None,
    numerics=replace(
        BY_PRODUCT, products=replace(BY_PRODUCT.products, accumulator_rounded="block")
    ),
)
VARIANTS = [
    RIGHT,
    BLOCKS,
    replace(BLOCKS, name="rounds-more-often", forward=forward_by(by_product)),
    replace(
        BLOCKS,
        name="declares-fp32",
        numerics=replace(BY_PRODUCT, products=replace(BY_PRODUCT.products, accumulator="float32")),
    ),
    replace(
        RIGHT,
        name="declares-fp32-backward",
        gradients=replace(
            RIGHT.gradients, products=replace(RIGHT.gradients.products, accumulator="float32")
        ),
    ),
]
