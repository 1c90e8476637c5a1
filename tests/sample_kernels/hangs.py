"""Wrong: never returns when there are more keys than queries."""

import time

import torch

DTYPES = ("float32",)


def attention(q, k, v):
    while k.shape[2] > q.shape[2]:
        time.sleep(0.01)
    return torch.softmax((q @ k.mT) * q.shape[-1] ** -0.5, dim=-1) @ v
