"""flashinfer.single_prefill_with_kv_cache, as FlashInfer documents it.

It takes one sequence, in the layout NHD: q (seqlen_q, heads_q, head_dim), k and v (seqlen_kv,
heads_kv, head_dim); a batch is called sequence by sequence.  K and V can have fewer heads.  Causal
masks are aligned to the bottom right corner, `window_left` is inclusive under them, and -1 leaves
that side open.  A `logits_soft_cap` of 0 is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from references.masks import Causal
from references.tensor import Tensor, torch
from verify.adapters import Adapter
from verify.variant import AttentionArgs, Support


def call(function: Callable[..., Any], args: AttentionArgs, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """O of one call for each sequence."""
    keywords: dict[str, Any] = {
        "causal": isinstance(args.mask, Causal),
        "kv_layout": "NHD",
        "sm_scale": args.softmax_scale,
        "logits_soft_cap": args.softcap,
        "window_left": -1,
    }
    return torch.stack([function(*each, **keywords) for each in zip(q, k, v, strict=True)])


ADAPTER = Adapter(
    layout="bshd",
    support=Support(
        dtypes=("float16", "bfloat16"),
        head_dims=(64, 128, 256),
        masks=("full", "causal.square"),
        grouped_heads=True,
        scales="positive",
        score_mods=("softcap",),
        layouts="contiguous",
    ),
    call=call,
)
