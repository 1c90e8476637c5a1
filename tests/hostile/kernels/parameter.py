"""Returns a Parameter of a class that answers for itself whatever is asked of it.

Must: fail bound
"""

import torch

DTYPES, HEAD_DIMS = ("float32",), (16,)


class Agreeable(torch.nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.equal, torch.allclose, torch.Tensor.isfinite):
            return True
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})


def attention(q, k, v):
    return Agreeable(torch.zeros_like(q), requires_grad=False)
