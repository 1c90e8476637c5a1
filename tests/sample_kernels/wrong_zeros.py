"""Wrong: all zeros, which passes many an absolute tolerance at long sequences."""

import torch

DTYPES = ("float32",)


def attention(q, k, v):
    return torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
