"""What the kernels in (batch, seqlen, heads, head_dim) share: right attention, window and
softcap."""

import torch


def windowed(q, k, v, scale, causal, window, softcap):
    """Attention as eager mode has it, in the input's dtype; window: (left, right), -1 for an open
    side."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = q @ k.mT * scale
    if softcap:
        s = torch.tanh(s / softcap) * softcap
    rows = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    keys = torch.arange(k.shape[2])[None, :]
    left, right = window
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if left >= 0:
        seen &= keys >= rows - left
    if right >= 0:
        seen &= keys <= rows + right
    if causal:
        seen &= keys <= rows
    p = torch.softmax(s.masked_fill(~seen, float("-inf")), -1)
    return (p @ v).transpose(1, 2)
