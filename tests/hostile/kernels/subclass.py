"""Returns a tensor subclass that claims to be equal to everything.

Must: fail execution: not a torch.Tensor
"""

import torch

DTYPES, HEAD_DIMS = ("float32",), (16,)


class Agreeable(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.copy_, torch.equal, torch.allclose):
            return True
        return super().__torch_function__(func, types, args, kwargs or {})


def attention(q, k, v):
    return torch.zeros_like(q).as_subclass(Agreeable)
