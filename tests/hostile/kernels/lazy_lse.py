"""Returns an LSE of a class that ignores that it is copied.

Must: fail memory: unwritten
"""

import torch

DTYPES, HEAD_DIMS = ("float32",), (16,)


class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "copy_":
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


def attention(q, k, v):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return torch.softmax(scores, -1) @ v, scores.logsumexp(-1).as_subclass(Lazy)
