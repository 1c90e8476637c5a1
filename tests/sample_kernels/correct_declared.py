"""Correct and declared: blockwise online softmax with any structured or dense mask, GQA, any layout
and empty rows."""

import math

import torch

from verify.variant import Config, Contract, Numerics, Products, Softmax, Support, Variant

SUPPORT = Support(
    dtypes=("float16", "bfloat16", "float32"),
    head_dims=range(8, 257),
    masks=("full", "causal", "causal.tl", "window", "lengths", "documents", "prefix", "dense"),
    intersections=True,
    grouped_heads=True,
    separate_head_dim_v=True,
    min_seqlen=0,
    devices=("cpu", "cuda"),
)


def forward(args, out, lse, workspace):
    SUPPORT.check(args, out)
    group = args.heads_q // args.heads_kv
    q, k, v = (
        args.q.float(),
        args.k.float().repeat_interleave(group, 1),
        args.v.float().repeat_interleave(group, 1),
    )
    seen = args.mask.dense(args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv, device=q.device)
    top = q.new_full(q.shape[:3], -math.inf)
    total, acc = torch.zeros_like(top), q.new_zeros(*q.shape[:3], v.shape[-1])
    for start in range(0, args.seqlen_kv, args.config.block_n):
        block = slice(start, start + args.config.block_n)
        scores = (q @ k[:, :, block].mT * args.softmax_scale).masked_fill(
            ~seen[..., block], -math.inf
        )
        new = torch.maximum(top, scores.amax(-1))
        base = new.clamp(min=torch.finfo(torch.float32).min)
        p = torch.exp(scores - base[..., None])
        p_cast = p.to(args.v.dtype).float()
        shrink = torch.exp(top - base)
        total = total * shrink + p.sum(-1)
        acc = acc * shrink[..., None] + p_cast @ v[:, :, block]
        top = new
    out.copy_(torch.where(total[..., None] == 0, 0.0, acc / total[..., None]))
    lse.copy_(top + total.log())


VARIANT = Variant(
    name="correct",
    family="torch",
    forward=forward,
    configs=[Config(block_n=32), Config(block_n=64)],
    support=SUPPORT,
    numerics=Numerics(products=Products(operands="float32"), softmax=Softmax(exp="vexp")),
    contract=Contract(masked_values="finite"),
)
