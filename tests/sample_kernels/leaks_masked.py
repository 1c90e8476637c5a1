"""Wrong: masks by adding -10000, so that a huge masked key still weighs."""

import torch

DTYPES = ("float32",)


def attention(q, k, v, causal=False):
    scores = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    if causal:
        scores = scores - 10000.0 * torch.ones_like(scores).triu(1)
    return (torch.softmax(scores, dim=-1) @ v.float()).to(q.dtype)
