"""One right kernel, forward and backward, and three that remember a launch: its scale, its mask, or
that there was one."""

import math
from functools import partial

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
    head_dims=range(8, 65),
    masks=("full", "causal", "causal.tl", "window", "lengths"),
    min_seqlen=0,
)
FAULTS = ("keeps-scale", "keeps-mask", "keeps-count")
KEPT = {}


def kept(args, fault, name, value):
    """What the first launch of these shapes brought, where that is the fault; else what this one
    brings."""
    return (
        KEPT.setdefault((fault, args.q.shape, args.k.shape), value)
        if fault == f"keeps-{name}"
        else value
    )


def scores(args, fault):
    mask, scale = (
        kept(args, fault, "mask", args.mask),
        kept(args, fault, "scale", args.softmax_scale),
    )
    seen = mask.dense(args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv)
    return (args.q @ args.k.mT * scale).masked_fill(~seen, -math.inf), scale


def last_bit(args, fault, result):
    """The next number away from 0 whenever the launch before had another scale: a fault within any
    bound."""
    before, KEPT[fault] = KEPT.get(fault, args.softmax_scale), args.softmax_scale
    return (
        torch.nextafter(result, 2 * result)
        if fault == "keeps-count" and before != args.softmax_scale
        else result
    )


def weights(s, lse):
    return torch.exp(s - lse.clamp(min=torch.finfo(torch.float32).min)[..., None])


def forward(args, out, lse, workspace, fault=""):
    SUPPORT.check(args, out)
    s, _ = scores(args, fault)
    lse.copy_(torch.logsumexp(s, -1))
    out.copy_(last_bit(args, fault, weights(s, lse) @ args.v))


def backward(args, saved, dout, gradients, workspace, fault=""):
    SUPPORT.check(args, saved.out)
    s, scale = scores(args, fault)
    p = weights(s, saved.lse)
    ds = p * (dout @ args.v.mT - (dout * saved.out).sum(-1, keepdim=True))
    gradients.dq.copy_(last_bit(args, fault, ds @ args.k * scale))
    gradients.dk.copy_(ds.mT @ args.q * scale)
    gradients.dv.copy_(p.mT @ dout)


def variant(fault, entry):
    """Where the backward is on trial the forward is right: what it saves would be convicted
    first."""
    both = {"forward": forward, "backward": partial(backward, fault=fault)}
    return Variant(
        name=f"{fault or 'right'}-{entry}",
        family="torch",
        **(both if entry == "backward" else {"forward": partial(forward, fault=fault)}),
        configs=[Config()],
        support=SUPPORT,
        numerics=Numerics(
            products=Products(operands="float32"),
            softmax=Softmax(exp="vexp", block_n=0),
            output=Output(normalised=True, normaliser="lse", probability="float32"),
        ),
        gradients=GradientNumerics(
            products=GradientProducts(operands="float32"),
            softmax=GradientSoftmax(exp="vexp"),
            sums=GradientSums(block_m=0, block_n=0),
        )
        if entry == "backward"
        else None,
        contract=Contract(),
    )


VARIANTS = [variant(fault, entry) for fault in ("", *FAULTS) for entry in ("forward", "backward")]
