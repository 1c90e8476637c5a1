"""Wrong: declared deterministic, but the last bits depend on chance."""

import os

import torch

DTYPES = ("float32",)


def attention(q, k, v):
    out = torch.softmax((q @ k.mT) * q.shape[-1] ** -0.5, dim=-1) @ v
    return out * (1 + 2.0**-19 * os.urandom(1)[0])
