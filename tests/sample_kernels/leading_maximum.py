"""Maxima that are only upper bounds of a row's own: right kernels, with one for a tile of rows or
rounded up, and wrong ones, which say nothing of that or lead further than they say.  P is in fp16,
so that it shows."""

import math
from dataclasses import replace

import torch

from verify.variant import Contract, Maximum, Numerics, Products, Softmax, Support, Variant

SUPPORT = Support(
    dtypes=("float16",),
    head_dims=(16, 64),
    masks=("full", "causal", "lengths"),
    grouped_heads=True,
)
TILE, BLOCK = 16, 32


def of_tile(top):
    rows = top.shape[2]
    padded = torch.nn.functional.pad(top, (0, 0, 0, -rows % TILE), value=-math.inf)
    tiles = padded.unflatten(2, (-1, TILE)).amax(3, keepdim=True).expand(-1, -1, -1, TILE, -1)
    return tiles.flatten(2, 3)[:, :, :rows]


def whole(top):
    """The next integer in base 2."""
    return torch.ceil(top / math.log(2)) * math.log(2)


def coarse(top):
    """Rounded up to bfloat16."""
    return torch.where(top == -math.inf, top, (top + top.abs() * 2**-8).bfloat16().float())


def forward_by(raised):
    def forward(args, out, lse, workspace):
        SUPPORT.check(args, out)
        group = args.heads_q // args.heads_kv
        k, v = (t.float().repeat_interleave(group, 1) for t in (args.k, args.v))
        seen = args.mask.dense(
            args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv, device=args.q.device
        )
        s = (args.q.float() @ k.mT * args.softmax_scale).masked_fill(~seen, -math.inf)
        top = s.new_full((*s.shape[:3], 1), torch.finfo(torch.float32).min)
        total, made = torch.zeros_like(top), s.new_zeros(*s.shape[:3], v.shape[-1])
        for at in range(0, args.seqlen_kv, BLOCK):
            part = s[..., at : at + BLOCK]
            new = torch.maximum(top, raised(part.amax(-1, keepdim=True)))
            shrink, p = torch.exp(top - new), torch.exp(part - new)
            total, top = total * shrink + p.sum(-1, keepdim=True), new
            made = made * shrink + p.half().float() @ v[:, :, at : at + BLOCK]
        out.copy_(torch.where(total == 0, 0.0, made / total))
        lse.copy_(torch.where(total == 0, -math.inf, top + total.log())[..., 0])

    return forward


def declared(**maximum: float) -> Numerics:
    return Numerics(
        products=Products(operands="float32"),
        softmax=Softmax(exp="vexp", block_n=BLOCK, maximum=Maximum(**maximum)),  # type: ignore[arg-type]
    )


NUMERICS = declared()
SHARED = Variant(
    name="shared",
    family="torch",
    forward=forward_by(of_tile),
    support=SUPPORT,
    numerics=declared(rows=TILE),
    contract=Contract(),
)
WHOLE = replace(
    SHARED,
    name="whole",
    forward=forward_by(whole),
    numerics=declared(excess=1.01),
)
COARSE = replace(
    SHARED,
    name="coarse",
    forward=forward_by(coarse),
    numerics=declared(step=2**-6),
)
VARIANTS = [
    SHARED,
    WHOLE,
    COARSE,
    replace(SHARED, name="shares-in-secret", numerics=NUMERICS),
    replace(WHOLE, name="leads-further", forward=forward_by(lambda top: top + 12)),
]
