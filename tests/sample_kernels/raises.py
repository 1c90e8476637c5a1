"""Wrong: raises for every ragged length."""

import torch

DTYPES = ("float32",)


def attention(q, k, v):
    if q.shape[2] % 16:
        raise RuntimeError("seqlen_q must be a multiple of 16")
    return torch.softmax((q @ k.mT) * q.shape[-1] ** -0.5, dim=-1) @ v
