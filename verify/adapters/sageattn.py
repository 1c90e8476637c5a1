"""sageattention.sageattn, as its docstring and the papers of SageAttention describe it.

Tensors are (batch, heads, seqlen, head_dim) for `tensor_layout="HND"` and (batch, seqlen, heads,
head_dim) for "NHD".  K and V can have fewer heads than Q.  `is_causal` is documented for as many
queries as keys.  With `return_lse` the natural LSE is returned, (batch, heads, seqlen_q).

Q and K become 8-bit integers inside, by factors of a block, a warp or a thread, after the mean of
the keys was subtracted from K.  Which of these, and whether P V is in 16 or in 8 bits, depends on
the GPU and is not promised, so that the bound is one of any grouping inside a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from references.masks import Causal
from references.tensor import Tensor
from verify.adapters import Adapter
from verify.variant import (
    AttentionArgs,
    Numerics,
    Output,
    Products,
    Quantised,
    RowSum,
    Softmax,
    Support,
)

_BLOCK = 128  # rows of Q, and keys, inside which a factor is shared
_KEYS = 64  # of a step over the keys, at least
_FP8 = (
    "P and V are rounded to float8 there, with a factor for each column of V, and no part of"
    " Numerics says so"
)


def call(function: Callable[..., Any], args: AttentionArgs, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """O and LSE of one call."""
    return function(
        q,
        k,
        v,
        is_causal=isinstance(args.mask, Causal),
        sm_scale=args.softmax_scale,
        return_lse=True,
    )


def numerics(capability: tuple[int, int] | None) -> Numerics | str:
    """P and V in float16, whose sums on GPUs before compute capability 8.9 are in fp32, or in fp16
    for a step of keys.  On a CPU, the arithmetic of a double of the signature."""
    if capability is not None and capability >= (8, 9):
        return _FP8
    return Numerics(
        products=Products(
            accumulator="float32" if capability in (None, (8, 0)) else "float16",
            score_accumulator=None if capability in (None, (8, 0)) else "float32",
            promotion=0 if capability in (None, (8, 0)) else "block",
        ),
        softmax=Softmax(
            exp="exp_u20" if capability is None else "ex2.approx",
            # sm_scale, log2(e), both factors, and three products of them
            scale_roundings=5,
            block_n=_KEYS,
            row_sum=RowSum(of="any"),
        ),
        output=Output(probability="float16"),
        quantised=Quantised(
            products="int8", query_tile=_BLOCK, key_tile=_BLOCK, floor=1e-7, centred="input"
        ),
    )


ADAPTER = Adapter(
    layout="bhsd",
    support=Support(
        dtypes=("float16", "bfloat16"),
        head_dims=(64, 96, 128),
        masks=("full", "causal.square"),
        grouped_heads=True,
        min_seqlen=1,
        scales="positive",
        layouts="contiguous",
        capability=(8, 0),
    ),
    call=call,
    layouts={"bhsd": {"tensor_layout": "HND"}, "bshd": {"tensor_layout": "NHD"}},
    lse="natural",
    numerics=numerics,
    no_gradients="SageAttention is for inference: its rounding to integers has no gradient",
)
