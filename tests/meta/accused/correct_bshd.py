"""flash_attn_func as flash-attn has it, in (batch, seqlen, heads, head_dim), with its window and softcap: right, and in another
layout than the usual one."""

import torch

DTYPES = ("float32", "bfloat16")
HEAD_DIMS = (32,)
LAYOUT = "bshd"


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = q @ k.mT * softmax_scale
    if softcap:
        s = torch.tanh(s / softcap) * softcap  # in the input's dtype, as eager mode has it
    rows = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    keys = torch.arange(k.shape[2])[None, :]
    left, right = window_size
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if left >= 0:
        seen &= keys >= rows - left
    if right >= 0:
        seen &= keys <= rows + right
    if causal:
        seen &= keys <= rows
    p = torch.softmax(s.masked_fill(~seen, float("-inf")), -1)
    return (p @ v).transpose(1, 2)
