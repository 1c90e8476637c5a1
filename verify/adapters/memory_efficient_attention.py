"""xformers.ops.memory_efficient_attention, as xFormers documents it.

Tensors are (batch, seqlen, heads, head_dim), with as many heads of K and V as of Q.  A mask comes
as a tensor that is added to the scores, (batch, heads, seqlen_q, seqlen_kv) in the dtype of Q, -inf
where a key is hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from references.masks import Full
from references.tensor import Tensor
from verify.adapters import Adapter
from verify.variant import AttentionArgs, Support


def call(function: Callable[..., Any], args: AttentionArgs, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """O of one call."""
    bias = None
    if not isinstance(args.mask, Full):
        shape = args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv
        seen = args.mask.dense(*shape, device=q.device)
        bias = q.new_zeros(shape).masked_fill_(~seen, -math.inf)
    return function(q, k, v, attn_bias=bias, p=0.0, scale=args.softmax_scale)


ADAPTER = Adapter(
    layout="bshd",
    support=Support(
        dtypes=("float16", "bfloat16", "float32"),
        head_dims=(32, 64, 128),
        masks=("full", "causal.tl", "causal.square", "window.square", "prefix"),
        scales="positive",
        layouts="contiguous",
    ),
    call=call,
)
