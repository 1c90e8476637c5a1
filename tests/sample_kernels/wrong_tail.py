"""Wrong: keys past the last multiple of 16 are dropped."""

import torch

DTYPES = ("float32",)


def attention(q, k, v):
    n = max(k.shape[2] // 16 * 16, 1)
    k, v = k[:, :, :n], v[:, :, :n]
    return torch.softmax((q @ k.mT) * q.shape[-1] ** -0.5, dim=-1) @ v
