"""Wrong: returns fp64."""

import torch

DTYPES = ("float32",)


def attention(q, k, v):
    return (
        torch.softmax((q.double() @ k.double().mT) * q.shape[-1] ** -0.5, dim=-1) @ v.double()
    ).double()
