"""Wrong: no maximum is subtracted, so that large logits overflow."""

import torch

DTYPES = ("float32",)


def attention(q, k, v, softmax_scale=None):
    p = torch.exp((q.float() @ k.float().mT) * softmax_scale)
    return ((p / p.sum(-1, keepdim=True)) @ v.float()).to(q.dtype)
