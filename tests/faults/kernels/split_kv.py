"""Split-KV attention in plain torch: each part of the keys gives a normalised O and an LSE, and a
merge weighs them by 2^LSE.

What flash decoding does (Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference",
2023), in fp32 on a CPU, so that faults of splitting, merging and decoding can be planted, which no
shipped kernel could have.  One query per head takes a path of its own, where the query heads that
share a key head are the rows of one tile.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verify.variant import (
    AttentionArgs,
    Config,
    Contract,
    Numerics,
    Output,
    Products,
    Softmax,
    Support,
    Variant,
    Workspace,
)

TILE = 16  # parts begin at multiples of it


@dataclass(frozen=True)
class Tile:
    """q (batch, heads, rows, head_dim), k and v by the same heads, in fp32, and which pairs are
    visible, (batch, heads, rows, keys)."""

    q: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor


def decode_tile(args: AttentionArgs) -> Tile:
    """One query per head: the heads of a group are the rows."""
    group = args.heads_q // args.heads_kv
    seen = args.mask.dense(args.batch, args.heads_q, 1, args.seqlen_kv)
    return Tile(
        args.q.float().reshape(args.batch, args.heads_kv, group, args.head_dim),
        args.k.float(),
        args.v.float(),
        seen.reshape(args.batch, args.heads_kv, group, args.seqlen_kv),
    )


def prefill_tile(args: AttentionArgs) -> Tile:
    """Several queries: keys and values are repeated for each head."""
    group = args.heads_q // args.heads_kv
    k, v = (tensor.float().repeat_interleave(group, 1) for tensor in (args.k, args.v))
    return Tile(
        args.q.float(),
        k,
        v,
        args.mask.dense(args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv),
    )


def partial(args: AttentionArgs, tile: Tile, keys: slice) -> tuple[Tensor, Tensor]:
    """O and LSE of some of the keys; 0 and -inf where a row sees none of them."""
    scores = tile.q @ tile.k[:, :, keys].mT * args.softmax_scale
    if args.softcap:
        scores = args.softcap * torch.tanh(scores / args.softcap)
    seen = tile.seen[..., keys]
    scores = scores.masked_fill(~seen, -math.inf)
    maximum = scores.amax(-1)
    shift = maximum.masked_fill(maximum == -math.inf, 0.0)
    p = torch.exp(scores - shift[..., None])
    total = p.sum(-1)
    # A NaN behind the mask would enter the product as 0 * NaN; rows that do see one get it
    # afterwards.
    v = tile.v[:, :, keys]
    finite = v.isfinite()
    out = p @ v.masked_fill(~finite, 0.0)
    spoiled = seen.float() @ (~finite).float() > 0
    return (out / total.masked_fill(total == 0, 1.0)[..., None]).masked_fill(
        spoiled, math.nan
    ), maximum + torch.log(total)


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """O and LSE of all keys, from those of the parts along dimension 0."""
    maximum = lses.amax(0)
    shift = maximum.masked_fill(maximum == -math.inf, 0.0)
    weights = torch.exp(lses - shift)
    total = weights.sum(0)
    out = (weights[..., None] * outs).sum(0)
    return out / total.masked_fill(total == 0, 1.0)[..., None], maximum + torch.log(total)


def splits_of(config: Config) -> int:
    """How many parts a config asks for."""
    return int(dict(config.options)["splits"])


def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
    """O and natural LSE; raises `Unsupported`."""
    SUPPORT.check(args, out)
    assert lse is not None
    if args.seqlen_q == 0:
        return
    tile = decode_tile(args) if args.seqlen_q == 1 else prefill_tile(args)
    splits = splits_of(args.config)
    chunk = -(-args.seqlen_kv // (splits * TILE)) * TILE
    outs, lses = workspace["outs"], workspace["lses"]
    for split in range(splits):
        begin, end = split * chunk, min((split + 1) * chunk, args.seqlen_kv)
        if begin >= end:
            outs[split], lses[split] = 0.0, -math.inf
            continue
        part, part_lse = partial(args, tile, slice(begin, end))
        outs[split], lses[split] = part.reshape(out.shape), part_lse.reshape(lse.shape)
    merged, merged_lse = merge(outs, lses)
    out.copy_(merged)
    lse.copy_(merged_lse)


def workspace_of(args: AttentionArgs) -> dict[str, tuple[tuple[int, ...], str]]:
    """O and LSE of every part."""
    rows = (splits_of(args.config), args.batch, args.heads_q, args.seqlen_q)
    return {"outs": ((*rows, args.head_dim_v), "float32"), "lses": (rows, "float32")}


SUPPORT = Support(
    dtypes=("float32", "float16", "bfloat16"),
    head_dims=range(1, 65),
    masks=("full", "causal", "causal.tl", "window", "lengths", "documents", "prefix", "dense"),
    intersections=True,
    grouped_heads=True,
    separate_head_dim_v=True,
    score_mods=("softcap",),
    min_seqlen=0,
    devices=("cpu",),
)

VARIANT = Variant(
    name="torch-split-kv",
    family="torch",
    forward=forward,
    configs=(
        Config(block_n=32, options=(("splits", 3),)),
        Config(block_n=16, options=(("splits", 5),)),
    ),
    support=SUPPORT,
    numerics=Numerics(
        products=Products(operands="float32"),
        softmax=Softmax(exp="vexp"),
        output=Output(probability="float32", split_keys=True),
    ),
    contract=Contract(masked_values="any", batch_invariant=False),
    workspace=workspace_of,
)
