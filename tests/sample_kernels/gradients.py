"""One right backward and five wrong ones: without delta, with the heads of a group not summed, with
the scale forgotten in dK, with a tail of dV left unwritten, and with dQ added to what is there."""

import math
from dataclasses import replace

import torch

from verify.variant import (
    Config,
    Contract,
    GradientNumerics,
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
    dtypes=("float32",),
    head_dims=(16, 32, 64),
    masks=("full", "causal", "lengths"),
    grouped_heads=True,
    layouts="contiguous",
)


def scores(args):
    group = args.heads_q // args.heads_kv
    k, v = (t.repeat_interleave(group, 1) for t in (args.k, args.v))
    seen = args.mask.dense(
        args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv, device=args.q.device
    )
    return k, v, (args.q @ k.mT * args.softmax_scale).masked_fill(~seen, -math.inf)


def forward(args, out, lse, workspace):
    SUPPORT.check(args, out)
    _, v, s = scores(args)
    total = torch.logsumexp(s, -1)
    p = torch.exp(s - total.clamp(min=torch.finfo(torch.float32).min)[..., None])
    out.copy_(p @ v)
    lse.copy_(total)


def gradients(args, saved, dout, *, delta=True):
    k, v, s = scores(args)
    p = torch.exp(s - saved.lse.clamp(min=torch.finfo(torch.float32).min)[..., None])
    ds = p * (dout @ v.mT - delta * (dout * saved.out).sum(-1, keepdim=True))
    shape = args.batch, args.heads_kv, args.heads_q // args.heads_kv, args.seqlen_kv, -1
    return (
        ds @ k * args.softmax_scale,
        (ds.mT @ args.q * args.softmax_scale).view(shape),
        (p.mT @ dout).view(shape),
    )


def backward(args, saved, dout, gradient, workspace):
    SUPPORT.check(args, saved.out)
    dq, dk, dv = gradients(args, saved, dout)
    gradient.dq.copy_(dq)
    gradient.dk.copy_(dk.sum(2))
    gradient.dv.copy_(dv.sum(2))


def without_delta(args, saved, dout, gradient, workspace):
    SUPPORT.check(args, saved.out)
    dq, dk, dv = gradients(args, saved, dout, delta=False)
    gradient.dq.copy_(dq)
    gradient.dk.copy_(dk.sum(2))
    gradient.dv.copy_(dv.sum(2))


def one_head(args, saved, dout, gradient, workspace):
    SUPPORT.check(args, saved.out)
    dq, dk, dv = gradients(args, saved, dout)
    gradient.dq.copy_(dq)
    gradient.dk.copy_(dk[:, :, 0])
    gradient.dv.copy_(dv[:, :, 0])


def without_scale(args, saved, dout, gradient, workspace):
    backward(args, saved, dout, gradient, workspace)
    gradient.dk.copy_(
        torch.where(
            torch.tensor(args.softmax_scale == 0), gradient.dk, gradient.dk / args.softmax_scale
        )
    )


def without_tail(args, saved, dout, gradient, workspace):
    SUPPORT.check(args, saved.out)
    dq, dk, dv = gradients(args, saved, dout)
    whole = max(args.seqlen_kv // 16 * 16, 1)
    gradient.dq.copy_(dq)
    gradient.dk.copy_(dk.sum(2))
    gradient.dv[:, :, :whole].copy_(dv.sum(2)[:, :, :whole])


def accumulated(args, saved, dout, gradient, workspace):
    before = gradient.dq.nan_to_num(nan=0.0)
    backward(args, saved, dout, gradient, workspace)
    gradient.dq.add_(before)


RIGHT = Variant(
    name="right",
    family="torch",
    forward=forward,
    backward=backward,
    configs=[Config()],
    support=SUPPORT,
    numerics=Numerics(
        products=Products(operands="float32"),
        softmax=Softmax(exp="vexp", block_n=0),
        output=Output(normalised=True, normaliser="lse"),
    ),
    gradients=GradientNumerics(
        products=GradientProducts(operands="float32"),
        softmax=GradientSoftmax(exp="vexp"),
        sums=GradientSums(block_m=0, block_n=0),
    ),
    contract=Contract(),
)
WRONG = Variant(
    name="without-delta",
    family="torch",
    backward=without_delta,
    saved_by=RIGHT,
    configs=RIGHT.configs,
    support=SUPPORT,
    gradients=RIGHT.gradients,
)
VARIANTS = [
    RIGHT,
    WRONG,
    replace(WRONG, name="one-head", backward=one_head),
    replace(WRONG, name="without-scale", backward=without_scale),
    replace(WRONG, name="without-tail", backward=without_tail),
    replace(WRONG, name="accumulated", backward=accumulated),
]
