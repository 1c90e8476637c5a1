"""Right alone, wrong beside another launch: all launches put their scores into one buffer.  Its
twin has one for each."""

import functools
import math

import torch

from verify.variant import Numerics, Softmax, Support, Variant

SUPPORT = Support(
    dtypes=("float32",), head_dims=(16, 32, 64), masks=("full", "causal"), layouts="contiguous"
)
_WAIT = 2_000_000  # clock cycles, long enough for another stream to write


@functools.cache
def _shared(shape, device):
    return torch.empty(shape, device=device)


def kernel(scratch):
    def forward(args, out, lse, workspace):
        SUPPORT.check(args, out)
        shape = (args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv)
        scores = scratch(shape, args.q.device)
        scores.copy_((args.q[..., None, :] * args.k[..., None, :, :]).sum(-1))
        if scores.is_cuda:
            torch.cuda._sleep(_WAIT)
        seen = args.mask.dense(*shape, device=args.q.device)
        scaled = (scores * args.softmax_scale).masked_fill(~seen, -math.inf)
        top = scaled.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
        p = torch.exp(scaled - top)
        total = p.sum(-1)
        out.copy_(
            torch.where(
                total[..., None] == 0,
                0.0,
                (p[..., None] * args.v[..., None, :, :]).sum(-2) / total[..., None],
            )
        )
        lse.copy_(top[..., 0] + total.log())

    return forward


def _own(shape, device):
    return torch.empty(shape, device=device)


VARIANTS = [
    Variant(
        name=name,
        family="torch",
        forward=kernel(scratch),
        support=SUPPORT,
        numerics=Numerics(softmax=Softmax(exp="vexp", block_n=0)),
    )
    for name, scratch in (("own-scratch", _own), ("shared-scratch", _shared))
]
