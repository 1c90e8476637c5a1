"""Gradients whose D is the sum of P dP, of a P from the saved LSE: a right backward, and wrong
ones: D without its last key, D of the O that it declares not to read, and D of a P rounded in
secret."""

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
    dtypes=("float16", "bfloat16", "float32"),
    head_dims=(16, 32, 64),
    masks=("full", "causal", "lengths"),
    grouped_heads=True,
    score_mods=("softcap",),
)


def scores(args):
    group = args.heads_q // args.heads_kv
    k, v = (t.float().repeat_interleave(group, 1) for t in (args.k, args.v))
    seen = args.mask.dense(
        args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv, device=args.q.device
    )
    s = args.q.float() @ k.mT * args.softmax_scale
    slope = 1.0
    if args.softcap:
        tangent = torch.tanh(s / args.softcap)
        s, slope = args.softcap * tangent, 1 - tangent * tangent
    return s.masked_fill(~seen, -math.inf), slope, seen, k, v


def forward(args, out, lse, workspace):
    SUPPORT.check(args, out)
    s, _, _, _, v = scores(args)
    top = s.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True)
    out.copy_(torch.where(total == 0, 0.0, e / total) @ v)
    lse.copy_((top + total.log())[..., 0])


def gradients_of(args, saved, dout, delta_of):
    s, slope, seen, k, v = scores(args)
    dout = dout.float()
    lse = saved.lse[..., None]
    p = torch.where(seen, torch.exp(s - torch.where(lse == -math.inf, math.inf, lse)), 0.0)
    dp = dout @ v.mT
    ds = torch.where(seen, p * (dp - delta_of(saved, p, dp, dout)) * slope, 0.0)
    group = args.heads_q // args.heads_kv
    dq = ds @ k * args.softmax_scale
    dk = ds.mT @ args.q.float() * args.softmax_scale
    dv = p.mT @ dout
    return dq, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))


def backward_by(delta_of):
    def backward(args, saved, dout, gradients, workspace):
        SUPPORT.check_backward(args, saved, dout, gradients)
        gradients.copy_(*gradients_of(args, saved, dout, delta_of))

    return backward


def of_weights(saved, p, dp, dout):
    return (p * dp).sum(-1, keepdim=True)


def without_a_key(saved, p, dp, dout):
    return (p * dp)[..., :-1].sum(-1, keepdim=True)


def of_output(saved, p, dp, dout):
    return (saved.out.float() * dout).sum(-1, keepdim=True)


def of_rounded(saved, p, dp, dout):
    return (p.bfloat16() * dp).sum(-1, keepdim=True)


RIGHT = Variant(
    name="right",
    family="torch",
    forward=forward,
    backward=backward_by(of_weights),
    support=SUPPORT,
    numerics=Numerics(
        products=Products(operands="float32"),
        softmax=Softmax(exp="vexp", block_n=0),
        output=Output(probability="float32", normalised=True),
    ),
    gradients=GradientNumerics(
        products=GradientProducts(operands="float32"),
        softmax=GradientSoftmax(exp="vexp", probability="float32"),
        score_gradient=ScoreGradient(delta_of="weights", dtype="float32"),
        sums=GradientSums(block_m=0, block_n=0),
    ),
    contract=Contract(),
)
VARIANTS = [
    RIGHT,
    replace(RIGHT, name="without-a-key", backward=backward_by(without_a_key)),
    replace(RIGHT, name="reads-the-output", backward=backward_by(of_output)),
    replace(RIGHT, name="of-rounded", backward=backward_by(of_rounded)),
]
