"""Wrong: scales q in place."""

import torch

DTYPES = ("float32",)


def attention(q, k, v):
    q.mul_(q.shape[-1] ** -0.5)
    return torch.softmax(q @ k.mT, dim=-1) @ v
