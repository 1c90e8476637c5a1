"""Gradients by autograd, through a softmax of their own: a right function, and three wrong ones:
without delta, with one that reads what it declares not to, and with a scale that was rounded to 8
bits."""

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


def attention(args, q, k, v, *, scale=None, delta=True):
    group = args.heads_q // args.heads_kv
    k, v = (t.float().repeat_interleave(group, 1) for t in (k, v))
    seen = args.mask.dense(args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv, device=q.device)
    s = q.float() @ k.mT * (args.softmax_scale if scale is None else scale)
    if args.softcap:
        s = args.softcap * torch.tanh(s / args.softcap)
    s = s.masked_fill(~seen, -math.inf)
    e = torch.exp(s - s.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min))
    total = e.sum(-1, keepdim=True)
    total = torch.where(total == 0, 1.0, total)
    return (e / (total if delta else total.detach()) @ v).to(q.dtype)


def forward(args, out, lse, workspace):
    SUPPORT.check(args, out)
    out.copy_(attention(args, args.q, args.k, args.v))


def differentiated(args, dout, **changes):
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (args.q, args.k, args.v)]
        return torch.autograd.grad(attention(args, *inputs, **changes), inputs, dout)


def backward(args, saved, dout, gradients, workspace):
    SUPPORT.check_backward(args, saved, dout, gradients)
    gradients.copy_(*differentiated(args, dout))


def without_delta(args, saved, dout, gradients, workspace):
    SUPPORT.check_backward(args, saved, dout, gradients)
    gradients.copy_(*differentiated(args, dout, delta=False))


def reads_what_was_saved(args, saved, dout, gradients, workspace):
    SUPPORT.check_backward(args, saved, dout, gradients)
    dq, dk, dv = differentiated(args, dout)
    gradients.copy_(dq + 0 * saved.out.sum(), dk, dv)


def rounded_scale(args, saved, dout, gradients, workspace):
    SUPPORT.check_backward(args, saved, dout, gradients)
    gradients.copy_(
        *differentiated(args, dout, scale=float(torch.tensor(args.softmax_scale).bfloat16()))
    )


RIGHT = Variant(
    name="right",
    family="torch",
    forward=forward,
    backward=backward,
    support=SUPPORT,
    numerics=Numerics(
        products=Products(operands="float32"),
        softmax=Softmax(exp="vexp", block_n=0),
        output=Output(probability="float32", normalised=True),
    ),
    gradients=GradientNumerics(
        products=GradientProducts(operands="float32"),
        softmax=GradientSoftmax(source="own", exp="vexp", probability="float32"),
        score_gradient=ScoreGradient(dtype="float32"),
        sums=GradientSums(block_m=0, block_n=0),
    ),
    contract=Contract(lse=None),
)
VARIANTS = [
    RIGHT,
    replace(RIGHT, name="without-delta", backward=without_delta),
    replace(RIGHT, name="reads-what-was-saved", backward=reads_what_was_saved),
    replace(RIGHT, name="rounded-scale", backward=rounded_scale),
]
