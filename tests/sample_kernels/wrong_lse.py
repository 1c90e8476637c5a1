"""Wrong: a base-2 LSE where the natural one is declared."""

import math

import torch

DTYPES = ("float32",)


def attention(q, k, v):
    scores = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.exp(scores - lse[..., None]) @ v.float()
    return out.to(q.dtype), lse / math.log(2)
