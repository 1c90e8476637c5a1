"""Wrong: exponentials come from a table with 64 entries per unit, without interpolation: errors of
0.8 per cent, less than rounded scores can cost."""

import torch

DTYPES = ("float16",)


def attention(q, k, v, softmax_scale=None):
    scores = (q.float() @ k.float().mT) * softmax_scale
    weights = torch.exp(torch.round((scores - scores.amax(-1, keepdim=True)) * 64) / 64)
    return (weights / weights.sum(-1, keepdim=True)).to(q.dtype) @ v
