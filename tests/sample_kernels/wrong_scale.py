"""Wrong: the scale is hard-coded for head_dim 64."""

import torch

DTYPES = ("float32",)


def attention(q, k, v):
    return torch.softmax((q @ k.mT) * 0.125, dim=-1) @ v
