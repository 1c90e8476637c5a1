"""Wrong: one more key than causal allows."""

import torch

DTYPES = ("float32",)


def attention(q, k, v, causal=False):
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(
            torch.ones_like(scores, dtype=torch.bool).triu(2), float("-inf")
        )
    return torch.softmax(scores, dim=-1) @ v
