"""Q and K rounded to 8-bit integers inside the kernel, as in SageAttention: right kernels, one of
which subtracts the mean of K before, and wrong ones."""

import math
from dataclasses import replace

import torch

from verify.variant import Contract, Numerics, Output, Quantised, Softmax, Support, Variant

QUERIES, KEYS = 32, 16
SUPPORT = Support(
    dtypes=("float16", "bfloat16"),
    head_dims=(16, 64),
    masks=("full", "causal", "lengths"),
    grouped_heads=True,
)


def tile_of(x, size):
    """The largest |x| of each tile, in each of its rows, (batch, heads, rows, 1)."""
    rows = x.shape[2]
    largest = torch.nn.functional.pad(x.abs().amax(-1), (0, -rows % size))
    tops = largest.unflatten(2, (-1, size)).amax(-1)
    return tops.repeat_interleave(size, 2)[:, :, :rows, None]


def by_tile(x, size):
    factor = tile_of(x, size) / 127 + 1e-7
    return torch.round(x / factor).to(torch.int8), factor


def wrapping(x, size):
    """The largest becomes 128, which is -128 in int8."""
    factor = tile_of(x, size) / 128 + 1e-12
    return torch.round(x / factor).to(torch.int16).to(torch.int8), factor


def by_column(x, size):
    """The largest of each element of head_dim, over the rows; what multiplies is that of the row's
    tile."""
    columns = x.abs().amax(2, keepdim=True) / 127 + 1e-7
    return torch.round(x / columns).to(torch.int8), tile_of(x, size) / 127 + 1e-7


def without_factor(x, size):
    """The first tile's factor for all."""
    numbers, factor = by_tile(x, size)
    return numbers, factor[:, :, :1].expand_as(factor)


def columns_of(v):
    """V in e4m3 and the factor of each column, the largest of all keys becoming 448."""
    factor = v.float().abs().amax(2, keepdim=True) / 448 if v.shape[2] else v.float().sum(2, True)
    factor = torch.where(factor == 0, 1.0, factor)
    return (v.float() / factor).to(torch.float8_e4m3fn).float(), factor


def forward_by(quantise, centred=False, added_back=True, keys_lost=0, eight=False):
    def forward(args, out, lse, workspace):
        SUPPORT.check(args, out)
        group = args.heads_q // args.heads_kv
        k, v = (x.repeat_interleave(group, 1) for x in (args.k, args.v))
        back = 0.0
        if centred and args.seqlen_kv:
            mean = k.mean(2, keepdim=True)
            k = k - mean
            if added_back:
                back = (args.q @ mean.mT).float()[..., 0] * args.softmax_scale
        seen = args.mask.dense(
            args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv, device=args.q.device
        )
        if keys_lost:
            seen = seen & (torch.arange(args.seqlen_kv) < args.seqlen_kv - keys_lost)
        quantised_q, of_q = by_tile(args.q.float(), QUERIES)
        quantised_k, of_k = quantise(k.float(), KEYS)
        sums = quantised_q.int() @ quantised_k.int().mT
        s = sums.float() * (of_q * of_k.mT * args.softmax_scale)
        s = s.masked_fill(~seen, -math.inf)
        top = s.amax(-1, keepdim=True) if args.seqlen_kv else s.new_zeros(*s.shape[:3], 1)
        top = top.clamp(min=torch.finfo(torch.float32).min)
        p = torch.exp(s - top)
        total = p.sum(-1, keepdim=True)
        if eight:
            numbers, factor = columns_of(v)
            made = (p * 448).to(torch.float8_e4m3fn).float() @ numbers * (factor / 448)
        else:
            made = p.to(v.dtype).float() @ v.float()
        out.copy_(torch.where(total == 0, 0.0, made / total))
        lse.copy_(torch.where(total == 0, -math.inf, top + total.log())[..., 0] + back)

    return forward


def declared(**quantised):
    return Numerics(
        softmax=Softmax(exp="vexp", block_n=0, scale_roundings=3),
        quantised=Quantised(
            products="int8", query_tile=QUERIES, key_tile=KEYS, floor=1e-7, **quantised
        ),
    )


INTEGERS = Variant(
    name="integers",
    family="torch",
    forward=forward_by(by_tile),
    support=SUPPORT,
    numerics=declared(),
    contract=Contract(nan="any"),
)
CENTRED = replace(
    INTEGERS,
    name="centred",
    forward=forward_by(by_tile, centred=True),
    numerics=declared(centred="input"),
)
EIGHT = replace(
    CENTRED,
    name="float8",
    forward=forward_by(by_tile, centred=True, eight=True),
    numerics=replace(
        declared(centred="input", value_top=448.0, probability_top=448.0),
        output=Output(probability="float8_e4m3fn"),
    ),
)
VARIANTS = [
    INTEGERS,
    CENTRED,
    EIGHT,
    replace(
        INTEGERS, name="undeclared", numerics=replace(INTEGERS.numerics, quantised=Quantised())
    ),
    replace(INTEGERS, name="wraps", forward=forward_by(wrapping)),
    replace(INTEGERS, name="by-column", forward=forward_by(by_column)),
    replace(INTEGERS, name="factor-forgotten", forward=forward_by(without_factor)),
    replace(INTEGERS, name="loses-a-key", forward=forward_by(by_tile, keys_lost=1)),
    replace(CENTRED, name="not-added-back", forward=forward_by(by_tile, True, False)),
]
