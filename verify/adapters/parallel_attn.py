"""fla.ops.parallel_attn of flash-linear-attention, as its docstring describes it.

Tensors are (batch, seqlen, heads, head_dim), with one length for Q, K and V.  K and V can have
fewer heads than Q.  The mask is always causal.  Without the decay factors g it is softmax
attention; O alone is returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from references.tensor import Tensor
from verify.adapters import Adapter
from verify.variant import AttentionArgs, Support


def call(function: Callable[..., Any], args: AttentionArgs, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """O of one call."""
    return function(q, k, v, scale=args.softmax_scale)


ADAPTER = Adapter(
    layout="bshd",
    support=Support(
        dtypes=("float16", "bfloat16"),
        head_dims=(32, 64, 128),
        masks=("causal.square",),
        grouped_heads=True,
        scales="positive",
        layouts="contiguous",
    ),
    call=call,
)
