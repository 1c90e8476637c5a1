"""One right forward and ten whose faults show when related questions are asked.  What the bound
says of each on the problem of `tests/meta/judging/test_metamorphic.py`: nothing."""

import math
from functools import partial

import torch

from references.masks import Causal
from verify.variant import Config, Contract, Numerics, Output, Products, Softmax, Support, Variant

SUPPORT = Support(
    dtypes=("float16", "float32"),
    head_dims=range(8, 65),
    masks=("full", "causal", "causal.tl", "window", "lengths", "documents", "prefix", "dense"),
    intersections=True,
    grouped_heads=True,
    separate_head_dim_v=True,
    min_seqlen=0,
)
LEAK = 1e-8
FAULTS = (
    "maximum-of-first-key",
    "maximum-from-zero",
    "ties-once",
    "lse-zero-without-key",
    "lse-sees-values",
    "leaks-hidden-values",
    "leaks-queries",
    "top-left-decode",
    "head-map",
    "leaks-batch",
)


def visible(args, fault=""):
    seen = args.mask.dense(
        args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv, device=args.q.device
    )
    if fault == "top-left-decode" and args.seqlen_q == 1 and isinstance(args.mask, Causal):
        seen = seen & (torch.arange(args.seqlen_kv) == 0)
    return seen


def heads(args, fault=""):
    """The key head of every query head; the wrong map is right where there are as many key heads as
    heads in a group."""
    query = torch.arange(args.heads_q)
    divisor = args.heads_kv if fault == "head-map" else args.heads_q // args.heads_kv
    return (query // divisor).clamp(max=args.heads_kv - 1)


def last_bit(result, where):
    """The next number away from 0 there: a fault within any bound."""
    return torch.where(where, torch.nextafter(result, 2 * result), result)


def sequence(args, b, fault):
    """O and LSE of one sequence, computed alone, so that its bits do not depend on how a BLAS cuts
    a batch."""
    own, seen = heads(args, fault), visible(args, fault)[b]
    q, k, v = args.q[b].float(), args.k[b].float()[own], args.v[b].float()[own]
    scores = (q @ k.mT * args.softmax_scale).masked_fill(~seen, -math.inf)
    top = scores.amax(-1) if args.seqlen_kv else scores.new_full(scores.shape[:2], -math.inf)
    if fault == "maximum-of-first-key" and args.seqlen_kv:
        top = torch.where(top > -math.inf, scores[..., 0], top)
    if fault == "maximum-from-zero":
        top = torch.where(top > -math.inf, top.clamp(min=0.0), top)
    p = torch.exp(scores - top.clamp(min=torch.finfo(torch.float32).min)[..., None])
    if fault == "ties-once":
        tied = scores == top[..., None]
        p = p.masked_fill(tied & (tied.cumsum(-1) > 1), 0.0)
    total = p.sum(-1)
    result, logs = (
        torch.where(total[..., None] == 0, 0.0, (p @ v) / total[..., None]),
        top + total.log(),
    )
    if fault == "lse-zero-without-key":
        logs = logs.masked_fill(~seen.any(-1), 0.0)
    if fault == "lse-sees-values":
        logs = torch.where(
            (v.abs().sum((-1, -2)) * 64 % 2 < 1)[..., None], logs, torch.nextafter(logs, logs + 1)
        )
    if fault == "leaks-hidden-values":
        result = last_bit(result, (~seen).float() @ v > 0)
    if fault == "leaks-queries":
        result = last_bit(result, q.sum(1, keepdim=True)[..., :1] > 0)
    return result, logs


def forward(args, out, lse, workspace, fault=""):
    SUPPORT.check(args, out)
    found = [sequence(args, b, fault) for b in range(args.batch)]
    result, logs = (torch.stack(parts) for parts in zip(*found, strict=True))
    if fault == "leaks-batch":
        result = result + LEAK * result.roll(1, 0)
    out.copy_(result)
    lse.copy_(logs)


def variant(name, fault=""):
    return Variant(
        name=name,
        family="torch",
        forward=partial(forward, fault=fault),
        configs=[Config()],
        support=SUPPORT,
        numerics=Numerics(
            products=Products(operands="float32"),
            softmax=Softmax(exp="vexp", block_n=0),
            output=Output(probability="float32"),
        ),
        contract=Contract(batch_invariant=True),
    )


VARIANTS = [variant("right"), *(variant(fault, fault) for fault in FAULTS)]
