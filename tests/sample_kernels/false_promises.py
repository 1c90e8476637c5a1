"""Wrong promises: an accumulator, a P, an exponential and an LSE that are not what is declared, and
a window that excludes its left end.  Each is near enough to pass an absolute tolerance of 1e-2 on
normal inputs, or is right by another convention."""

import math
from dataclasses import replace

import torch

from references.masks import Window
from verify.variant import Contract, Numerics, Products, Softmax, Support, Variant

SUPPORT = Support(
    dtypes=("bfloat16",), head_dims=(64,), masks=("full", "window"), layouts="contiguous"
)
NUMERICS = Numerics(products=Products(operands="float32"), softmax=Softmax(exp="vexp", block_n=0))


def product(a, b, accumulator):
    """a @ b, rounded to the accumulator after every 16 products."""
    total = a.new_zeros(*a.shape[:-1], b.shape[-1])
    for start in range(0, a.shape[-1], 16):
        part = slice(start, start + 16)
        total = (total + a[..., part] @ b[..., part, :]).to(accumulator).float()
    return total


def cubic(x):
    """exp with a polynomial of degree 3 for the fraction of the exponent."""
    power = x * math.log2(math.e)
    whole = power.clamp(min=-200).floor()
    f = power.clamp(min=-200) - whole
    return (1 + f * (0.695146 + f * (0.227564 + f * 0.0771191))) * torch.exp2(whole)


def kernel(
    accumulator=torch.float32, probability=torch.bfloat16, exp=torch.exp, base=1.0, exclusive=0
):
    def forward(args, out, lse, workspace):
        SUPPORT.check(args, out)
        mask = args.mask
        if isinstance(mask, Window) and mask.left:
            mask = Window(mask.left - exclusive, mask.right, mask.alignment)
        seen = mask.dense(
            args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv, device=args.q.device
        )
        scores = product(args.q.float(), args.k.float().mT, accumulator) * args.softmax_scale
        scores = scores.masked_fill(~seen, -math.inf)
        top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
        p = exp(scores - top).masked_fill(~seen, 0.0)
        total = p.sum(-1, keepdim=True)
        o = p.to(probability).float() @ args.v.float() / total
        live = seen.any(-1)
        out.copy_(torch.where(live[..., None], o, 0.0))
        lse.copy_(torch.where(live, (top + total.log())[..., 0] / base, -math.inf))

    return forward


BASE = Variant(
    name="as-declared",
    family="torch",
    forward=kernel(),
    support=SUPPORT,
    numerics=NUMERICS,
    contract=Contract(batch_invariant=False),
)
VARIANTS = [
    BASE,
    replace(BASE, name="fp16-accumulator", forward=kernel(accumulator=torch.float16)),
    replace(BASE, name="e4m3-probabilities", forward=kernel(probability=torch.float8_e4m3fn)),
    replace(BASE, name="cubic-exponential", forward=kernel(exp=cubic)),
    replace(BASE, name="base-2-lse", forward=kernel(base=math.log(2))),
    replace(BASE, name="exclusive-window", forward=kernel(exclusive=1)),
]
