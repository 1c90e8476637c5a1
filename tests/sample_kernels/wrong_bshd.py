"""A wrong flash_attn_func, whose window is one key too wide on the right, and whose softcap is
ignored in bfloat16."""

import torch
from bshd_base import windowed

DTYPES = ("float32", "bfloat16")
HEAD_DIMS = (32,)
LAYOUT = "bshd"


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
):
    left, right = window_size
    window = (left, right + 1 if right >= 0 else right)
    capped = softcap if q.dtype == torch.float32 else 0.0
    return windowed(q, k, v, softmax_scale, causal, window, capped)
