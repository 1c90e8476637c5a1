"""Right at the edges of fp32's range, as FlashAttention-2 is written: one fma per exponent, base 2,
P in 16 bits; and the same with flushed products and additive masks.  Then two wrong ones: a scale
held in fp16, and scores clamped to fp16's range."""

import math
from dataclasses import dataclass, replace

import torch

from verify.variant import (
    Config,
    Contract,
    GradientNumerics,
    GradientProducts,
    GradientSoftmax,
    GradientSums,
    Numerics,
    Products,
    Softmax,
    Support,
    Variant,
)

TINY = 2.0**-126
SUPPORT = Support(
    dtypes=("float16", "bfloat16", "float32"),
    head_dims=range(8, 257),
    masks=("full", "causal", "causal.tl", "window", "lengths", "documents", "prefix"),
    intersections=True,
    grouped_heads=True,
    min_seqlen=0,
)


def fma(a, b, c):
    """a b + c, rounded once."""
    return (a.double() * b.double() + c.double()).float()


def flush(x):
    return torch.where(x.abs() < TINY, 0.0, x)


@dataclass(frozen=True)
class Kernel:
    flushes: bool = False
    additive: bool = False
    half_scale: bool = False
    clamps: bool = False

    def scores(self, args):
        """Q K^T, what multiplies it in base 2, V, and the mask."""
        group = args.heads_q // args.heads_kv
        q, k, v = args.q.float(), *(x.float().repeat_interleave(group, 1) for x in (args.k, args.v))
        raw = (
            flush(flush(q[..., None, :] * k[..., None, :, :]).sum(-1)) if self.flushes else q @ k.mT
        )
        scale = torch.tensor(args.softmax_scale)
        if self.half_scale:
            scale = scale.half().float()
        if self.clamps:
            raw = raw.clamp(-65504.0, 65504.0)
        seen = args.mask.dense(
            args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv, device=q.device
        )
        if self.additive:
            raw = raw + torch.zeros_like(raw).masked_fill(
                ~seen, math.copysign(math.inf, -args.softmax_scale)
            )
        else:
            raw = raw.masked_fill(~seen, math.copysign(math.inf, -args.softmax_scale))
        return q, k, v, raw, scale * torch.tensor(math.log2(math.e)), scale

    def forward(self, args, out, lse, workspace):
        SUPPORT.check(args, out)
        _, _, v, raw, sigma, scale = self.scores(args)
        sign = math.copysign(1.0, args.softmax_scale)
        top = raw.new_full(raw.shape[:3], -math.inf)
        total, acc = torch.zeros_like(top), raw.new_zeros(*raw.shape[:3], v.shape[-1])
        for start in range(0, args.seqlen_kv, 32):
            part = raw[..., start : start + 32] * sign
            new = torch.maximum(top, part.amax(-1))
            base = torch.where(new == -math.inf, 0.0, new)[..., None]
            hidden = part == -math.inf
            y = fma(part, sigma * sign, -(base * (sigma * sign)))
            p = torch.exp2(y).masked_fill(hidden, 0.0)
            shrink = torch.exp2(
                ((top[..., None] - base) * (sigma * sign)).masked_fill(
                    top[..., None] == -math.inf, -math.inf
                )
            )
            total = total * shrink[..., 0] + p.sum(-1)
            acc = acc * shrink + p.to(args.v.dtype).float() @ v[:, :, start : start + 32]
            top = new
        empty = top == -math.inf
        out.copy_(torch.where(empty[..., None], 0.0, acc / total[..., None]))
        lse.copy_(torch.where(empty, -math.inf, top * (scale * sign) + total.log()))

    def backward(self, args, saved, dout, gradient, workspace):
        SUPPORT.check(args, saved.out)
        q, k, v, raw, sigma, scale = self.scores(args)
        dtype, grad = args.v.dtype, dout.float()
        shift = torch.where(saved.lse == -math.inf, 0.0, saved.lse * math.log2(math.e))[..., None]
        seen = args.mask.dense(
            args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv, device=q.device
        )
        p = torch.exp2(fma(raw, sigma, -shift)).masked_fill(~seen, 0.0)
        delta = (grad * saved.out.float()).sum(-1, keepdim=True)
        ds = (p * (grad @ v.mT - delta)).masked_fill(~seen, 0.0).to(dtype).float()
        shape = args.batch, args.heads_kv, args.heads_q // args.heads_kv, args.seqlen_kv, -1
        gradient.dq.copy_(ds @ k * scale)
        gradient.dk.copy_((ds.mT @ q).view(shape).sum(2) * scale)
        gradient.dv.copy_((p.to(dtype).float().mT @ grad).view(shape).sum(2))


def variant(name, kernel):
    return Variant(
        name=name,
        family="torch",
        forward=kernel.forward,
        backward=kernel.backward,
        configs=[Config()],
        support=SUPPORT,
        numerics=Numerics(
            products=Products(operands="float32"),
            softmax=Softmax(exp="vexp", block_n=32, scale_roundings=3),
        ),
        gradients=GradientNumerics(
            products=GradientProducts(operands="float32"),
            softmax=GradientSoftmax(exp="vexp", scale_roundings=3),
            sums=GradientSums(block_m=0, block_n=0),
        ),
        contract=Contract(masked_values="finite", nan="any"),
    )


FUSED = Kernel()
FLUSHED = replace(FUSED, flushes=True, additive=True)
VARIANTS = [
    variant("fused", FUSED),
    variant("flushed", FLUSHED),
    variant("half-scale", replace(FUSED, half_scale=True)),
    variant("clamps", replace(FUSED, clamps=True)),
]
