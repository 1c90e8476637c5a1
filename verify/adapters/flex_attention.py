"""torch.nn.attention.flex_attention.flex_attention, as torch documents it.

Tensors are (batch, heads, seqlen, head_dim).  Masks come as a BlockMask, a softcap as a score_mod,
fewer heads of K and V by `enable_gqa`.  The result alone is asked for, without the LSE.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from references.masks import Full
from references.tensor import Tensor, torch
from verify.adapters import Adapter
from verify.variant import AttentionArgs, Support


def call(function: Callable[..., Any], args: AttentionArgs, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """O of one call."""
    from torch.nn.attention.flex_attention import create_block_mask

    keywords: dict[str, Any] = {"scale": args.softmax_scale}
    if not isinstance(args.mask, Full):
        lengths = args.seqlen_q, args.seqlen_kv
        seen = args.mask.mod(*lengths, q.device)
        keywords["block_mask"] = create_block_mask(
            seen, args.batch, args.heads_q, *lengths, device=q.device
        )
    if args.softcap:
        cap = args.softcap
        keywords["score_mod"] = lambda score, b, h, row, key: cap * torch.tanh(score / cap)
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
        score_mods=("softcap",),
        layouts="contiguous",
    ),
    call=call,
)
