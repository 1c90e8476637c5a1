"""flash_attn.flash_attn_func of FlashAttention-2, as its docstring describes it.

Tensors are (batch, seqlen, heads, head_dim).  K and V can have fewer heads than Q.  Causal masks
and windows are aligned to the bottom right corner; a window (left, right) is inclusive, and -1
leaves a side open.  A softcap of 0 is none.  The result alone is returned, without the LSE.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from references.masks import Causal, Window
from references.tensor import Tensor
from verify.adapters import Adapter
from verify.variant import AttentionArgs, Support


def call(function: Callable[..., Any], args: AttentionArgs, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """O of one call."""
    sides = (args.mask.left, args.mask.right) if isinstance(args.mask, Window) else (None, None)
    window = tuple(-1 if side is None else side for side in sides)
    return function(
        q,
        k,
        v,
        softmax_scale=args.softmax_scale,
        causal=isinstance(args.mask, Causal),
        window_size=window,
        softcap=args.softcap,
    )


ADAPTER = Adapter(
    layout="bshd",
    support=Support(
        dtypes=("float16", "bfloat16"),
        head_dims=(32, 64, 96, 128, 256),
        masks=("full", "causal", "window.square"),
        grouped_heads=True,
        scales="positive",
        score_mods=("softcap",),
        layouts="contiguous",
    ),
    call=call,
)
