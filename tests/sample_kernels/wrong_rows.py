"""Wrong in four ways that only an edge shows: NaN for empty rows, query heads mapped to the wrong
key head, a tail read past the end of V, and results accumulated into a workspace that was never
cleared."""

import math
from dataclasses import replace

import torch

from verify.variant import Contract, Numerics, Output, Products, Softmax, Support, Variant

SUPPORT = Support(
    dtypes=("float32",),
    head_dims=(16, 32, 64),
    masks=("full", "causal", "lengths"),
    grouped_heads=True,
    layouts="contiguous",
)


def plain(args, group_of, empty):
    k, v = (t[:, group_of].float() for t in (args.k, args.v))
    seen = args.mask.dense(
        args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv, device=args.q.device
    )
    scores = (args.q.float() @ k.mT * args.softmax_scale).masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - lse.clamp(min=torch.finfo(torch.float32).min)[..., None])
    dead = ~seen.any(-1)
    return torch.where(dead[..., None], empty, p @ v), torch.where(dead, -math.inf, lse)


def heads(args, wrong=False):
    group = args.heads_q // args.heads_kv
    index = torch.arange(args.heads_q, device=args.q.device)
    return index % args.heads_kv if wrong else index // group


def nan_rows(args, out, lse, workspace):
    SUPPORT.check(args, out)
    o, logs = plain(args, heads(args), math.nan)
    out.copy_(o)
    lse.copy_(logs)


def head_map(args, out, lse, workspace):
    SUPPORT.check(args, out)
    o, logs = plain(args, heads(args, wrong=True), 0.0)
    out.copy_(o)
    lse.copy_(logs)


def tail(args, out, lse, workspace):
    SUPPORT.check(args, out)
    o, logs = plain(args, heads(args), 0.0)
    if args.seqlen_kv % 16:
        beyond = args.v.as_strided((1,), (1,), args.v.storage_offset() + args.v.numel())
        o = o + 0.0 * beyond
    out.copy_(o)
    lse.copy_(logs)


def scratch(args):
    return {"acc": ((args.batch, args.heads_q, args.seqlen_q, args.head_dim_v), "float32")}


def uncleared(args, out, lse, workspace):
    SUPPORT.check(args, out)
    o, logs = plain(args, heads(args), 0.0)
    workspace["acc"].nan_to_num_(nan=0.0).add_(o)
    out.copy_(workspace["acc"])
    lse.copy_(logs)


BASE = Variant(
    name="nan-rows",
    family="torch",
    forward=nan_rows,
    support=SUPPORT,
    numerics=Numerics(
        products=Products(operands="float32"),
        softmax=Softmax(exp="vexp"),
        output=Output(normalised=True),
    ),
    contract=Contract(),
)
VARIANTS = [
    BASE,
    replace(BASE, name="head-map", forward=head_map),
    replace(BASE, name="reads-past-the-end", forward=tail),
    replace(BASE, name="uncleared-workspace", forward=uncleared, workspace=scratch),
]
