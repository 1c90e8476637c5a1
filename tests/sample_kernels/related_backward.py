"""One right backward and six whose faults show when related questions are asked.  What the bound
says of each on the problem of `tests/meta/judging/test_metamorphic_backward.py`: nothing."""

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
    dtypes=("float16", "float32"),
    head_dims=range(8, 65),
    masks=("full", "causal", "causal.tl", "window", "lengths", "documents", "prefix", "dense"),
    intersections=True,
    grouped_heads=True,
    separate_head_dim_v=True,
)
LEAK = 1e-9
FAULTS = (
    "zero-is-padding",
    "leaks-batch",
    "head-map",
    "forgets-late-keys",
    "leaks-hidden-rows",
    "leaks-hidden-keys",
)


def scores(args, b):
    """Of one sequence, computed alone, so that its bits do not depend on how a BLAS cuts a
    batch."""
    seen = args.mask.dense(
        args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv, device=args.q.device
    )[b]
    group = args.heads_q // args.heads_kv
    q, k, v = (
        args.q[b].float(),
        args.k[b].float().repeat_interleave(group, 0),
        args.v[b].float().repeat_interleave(group, 0),
    )
    return seen, q, k, v, (q @ k.mT * args.softmax_scale).masked_fill(~seen, -math.inf)


def weights(s, lse):
    return torch.exp(s - lse.clamp(min=torch.finfo(torch.float32).min)[..., None])


def forward(args, out, lse, workspace):
    SUPPORT.check(args, out)
    for b in range(args.batch):
        _, _, _, v, s = scores(args, b)
        lse[b].copy_(torch.logsumexp(s, -1))
        out[b].copy_(weights(s, lse[b]) @ v)


def sequence(args, saved, dout, b, fault):
    seen, q, k, v, s = scores(args, b)
    do = dout[b].float()
    if fault == "zero-is-padding":
        do = do.masked_fill((do == 0).any(-1, keepdim=True), 0.0)
    p = weights(s, saved.lse[b])
    ds = p * (do @ v.mT - (do * saved.out[b].float()).sum(-1, keepdim=True))
    dq, dk, dv = ds @ k * args.softmax_scale, ds.mT @ q * args.softmax_scale, p.mT @ do
    if fault == "leaks-hidden-keys":
        dq = torch.where((~seen).float() @ k > 0, torch.nextafter(dq, 2 * dq), dq)
    if fault == "leaks-hidden-rows":
        dv = dv + LEAK * ((~seen).float().mT @ do)
    shape = args.heads_kv, args.heads_q // args.heads_kv, args.seqlen_kv, -1
    if fault == "head-map":  # right where there are as many key heads as heads in a group
        own = (torch.arange(args.heads_q) // args.heads_kv).clamp(max=args.heads_kv - 1)
        dk, dv = (x.new_zeros(shape[0], *x.shape[1:]).index_add(0, own, x) for x in (dk, dv))
    else:
        dk, dv = dk.view(shape).sum(1), dv.view(shape).sum(1)
    if fault == "forgets-late-keys":
        dk[:, 128:], dv[:, 128:] = 0, 0
    return dq, dk, dv


def backward(args, saved, dout, gradient, workspace, fault=""):
    SUPPORT.check(args, saved.out)
    found = [sequence(args, saved, dout, b, fault) for b in range(args.batch)]
    dq, dk, dv = (torch.stack(parts) for parts in zip(*found, strict=True))
    if fault == "leaks-batch":
        dk = dk + LEAK * dk.roll(1, 0)
    for to, result in ((gradient.dq, dq), (gradient.dk, dk), (gradient.dv, dv)):
        to.copy_(result)


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
        output=Output(normalised=True, normaliser="lse", probability="float32"),
    ),
    gradients=GradientNumerics(
        products=GradientProducts(operands="float32"),
        softmax=GradientSoftmax(exp="vexp"),
        sums=GradientSums(block_m=0, block_n=0),
    ),
    contract=Contract(batch_invariant=True),
)


def wrong(fault):
    return Variant(
        name=fault,
        family="torch",
        backward=partial(backward, fault=fault),
        saved_by=RIGHT,
        configs=RIGHT.configs,
        support=SUPPORT,
        gradients=RIGHT.gradients,
    )


VARIANTS = [RIGHT, *(wrong(fault) for fault in FAULTS)]
