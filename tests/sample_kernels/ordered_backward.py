"""Backwards that declare in which order they make their sums: three that keep it, and six that do
not.  Every sum is made term by term in fp32, along the terms as its order has them."""

from dataclasses import dataclass, replace
from functools import partial

import torch

from verify.variant import (
    Config,
    Contract,
    GradientNumerics,
    GradientOrder,
    GradientProducts,
    GradientSoftmax,
    GradientSums,
    Numerics,
    Output,
    Products,
    Softmax,
    Support,
    Variant,
)

SUPPORT = Support(
    dtypes=("bfloat16", "float16", "float32"),
    head_dims=(32,),
    masks=("full", "causal", "window"),
    layouts="contiguous",
)


@dataclass(frozen=True)
class Walk:
    """The order of each sum: a permutation of its terms, by their number.

    apart: rows of dK and dV that are added up by themselves before they join the sum; 0: none are.
    """

    head_dim: object = range
    keys: object = range
    rows: object = range
    apart: int = 0


def forward(args, out, lse, workspace):
    SUPPORT.check(args, out)
    seen = args.mask.dense(args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv)
    s = args.q.float() @ args.k.float().mT * args.softmax_scale
    s = s.masked_fill(~seen, -torch.inf)
    total = torch.logsumexp(s, -1)
    p = torch.exp(s - total.clamp(min=torch.finfo(torch.float32).min)[..., None])
    out.copy_((p @ args.v.float()).to(out.dtype))
    lse.copy_(total)


def product(left, right, order, apart=0):
    """left (..., m, n) times right (..., n, k) in fp32, its terms added in that order."""
    left, right = left.float(), right.float()
    total = left.new_zeros(*left.shape[:-1], right.shape[-1])
    part = total.clone()
    for count, at in enumerate(order(left.shape[-1]), 1):
        term = left[..., :, at : at + 1] * right[..., at : at + 1, :]
        if not apart:
            total += term
            continue
        part += term
        if count % apart == 0 or count == left.shape[-1]:
            total += part
            part = torch.zeros_like(total)
    return total


def backward(walk, args, saved, dout, gradient, workspace):
    SUPPORT.check_backward(args, saved, dout, gradient)
    dtype = args.q.dtype
    seen = args.mask.dense(args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv)
    s = product(args.q, args.k.mT, walk.head_dim) * args.softmax_scale
    lse = saved.lse.clamp(min=torch.finfo(torch.float32).min)[..., None]
    p = torch.exp2((s - lse) * 1.4426950408889634).masked_fill(~seen, 0.0)
    delta = (dout.float() * saved.out.float()).sum(-1, keepdim=True)
    ds = p * (product(dout, args.v.mT, walk.head_dim) - delta)
    p, ds = p.to(dtype), ds.masked_fill(~seen, 0.0).to(dtype)
    scale = args.softmax_scale
    gradient.dq.copy_((product(ds, args.k, walk.keys) * scale).to(dtype))
    gradient.dk.copy_((product(ds.mT, args.q, walk.rows, walk.apart) * scale).to(dtype))
    gradient.dv.copy_(product(p.mT, dout, walk.rows, walk.apart).to(dtype))


def whole_first(count):
    """Terms 32 to 47 first, then those before, then those behind."""
    return (*range(32, 48), *range(32), *range(48, count))


def within_steps(count):
    """Steps of 16 in order, the terms of each backwards."""
    return [at for start in range(0, count, 16) for at in reversed(range(start, start + 16))]


def first_step_last(count):
    return (*range(16, count), *range(16))


def backwards(count):
    return reversed(range(count))


def of(name, walk, blocks="ascending"):
    return replace(
        RIGHT,
        name=name,
        backward=partial(backward, walk),
        gradients=replace(
            RIGHT.gradients,
            order=GradientOrder(head_dim="ascending", keys=blocks, rows=blocks),
        ),
    )


RIGHT = Variant(
    name="ordered",
    family="torch",
    forward=forward,
    backward=partial(backward, Walk()),
    configs=[Config()],
    support=SUPPORT,
    numerics=Numerics(
        products=Products(operands="float32"),
        softmax=Softmax(exp="vexp", block_n=0),
        output=Output(normalised=True, normaliser="lse"),
    ),
    gradients=GradientNumerics(
        products=GradientProducts(operands="input"),
        softmax=GradientSoftmax(exp="vexp"),
        sums=GradientSums(block_m=0, block_n=0),
        order=GradientOrder(head_dim="ascending", keys="ascending", rows="ascending"),
    ),
    contract=Contract(),
)
VARIANTS = [
    RIGHT,
    of("within-steps", Walk(keys=within_steps, rows=within_steps)),
    of("whole-first", Walk(keys=whole_first, rows=whole_first), "whole_first"),
    of("whole-first-undeclared", Walk(keys=whole_first, rows=whole_first)),
    of("first-step-last", Walk(keys=first_step_last)),
    of("backwards", Walk(rows=backwards)),
    of("head-dim-backwards", Walk(head_dim=backwards)),
    of("parts", Walk(apart=32)),
    of("behind-before-whole", Walk(rows=backwards), "whole_first"),
]
