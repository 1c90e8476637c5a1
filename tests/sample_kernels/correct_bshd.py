"""flash_attn_func as flash-attn has it, in (batch, seqlen, heads, head_dim), with its window and
softcap: right, and in another layout than the usual one."""

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
    return windowed(q, k, v, softmax_scale, causal, window_size, softcap)
