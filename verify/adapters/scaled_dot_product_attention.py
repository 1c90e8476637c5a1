"""torch.nn.functional.scaled_dot_product_attention, as torch documents it.

Tensors are (batch, heads, seqlen, head_dim).  `is_causal` is aligned to the top left corner; every
other mask comes as booleans, True for visible.  `enable_gqa` allows fewer heads of K and V.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from references.masks import Causal, Full
from references.tensor import Tensor
from verify.adapters import Adapter
from verify.variant import AttentionArgs, Support


def call(function: Callable[..., Any], args: AttentionArgs, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """O of one call."""
    keywords: dict[str, Any] = {"scale": args.softmax_scale}
    square = args.seqlen_q == args.seqlen_kv
    if isinstance(args.mask, Causal) and (square or args.mask.alignment == "tl"):
        keywords["is_causal"] = True
    elif not isinstance(args.mask, Full):
        shape = args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv
        keywords["attn_mask"] = args.mask.dense(*shape, device=q.device).contiguous()
    if args.heads_q != args.heads_kv:
        keywords["enable_gqa"] = True
    return function(q, k, v, **keywords)


ADAPTER = Adapter(
    layout="bhsd",
    support=Support(
        dtypes=("float16", "bfloat16", "float32"),
        head_dims=(32, 64, 128),
        masks=("full", "causal.tl", "causal.square", "window.square", "prefix"),
        grouped_heads=True,
        scales="positive",
        layouts="contiguous",
    ),
    call=call,
)
