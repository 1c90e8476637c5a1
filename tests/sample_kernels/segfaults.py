"""Wrong: reads address 0."""

import ctypes

import torch

DTYPES = ("float32",)


def attention(q, k, v):
    if q.shape[2] > 16:
        ctypes.string_at(0)
    return torch.softmax((q @ k.mT) * q.shape[-1] ** -0.5, dim=-1) @ v
