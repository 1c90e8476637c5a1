"""Wrong: returns (batch, seqlen, heads, head_dim)."""

import torch

DTYPES = ("float32",)


def attention(q, k, v):
    out = torch.softmax((q @ k.mT) * q.shape[-1] ** -0.5, dim=-1) @ v
    return out.transpose(1, 2).contiguous()[:, :, :, :-1]
