"""sageattention.sageattn, as its docstring and the papers of SageAttention describe it.

Tensors are (batch, heads, seqlen, head_dim) for `tensor_layout="HND"` and (batch, seqlen, heads,
head_dim) for "NHD".  K and V can have fewer heads than Q.  `is_causal` is documented for as many
queries as keys.  With `return_lse`, which version 1 of the package lacks, the natural LSE is
returned, (batch, heads, seqlen_q).

Q and K become 8-bit integers inside, by factors of a block, a warp or a thread, after the mean of
the keys was subtracted from K.  Which of these depends on the GPU and is not promised, so that the
bound is one of any grouping inside a block.  P and V are in float16, or in float8 with a factor for
each column of V.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
_NARROW = (
    "P V in float8 is summed in fp16 there, close to the end of its range, and no bound is derived"
)
_NONE = "sageattn has no kernel for this compute capability"


def call(function: Callable[..., Any], args: AttentionArgs, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """O of one call, and LSE if `function` was made to return it."""
    return function(
        q,
        k,
        v,
        is_causal=isinstance(args.mask, Causal),
        sm_scale=args.softmax_scale,
    )


def numerics(capability: tuple[int, int] | None) -> Numerics | str:
    """That of P V by GPU: float16 summed in fp32 (8.0) or for a step of keys in fp16 (8.6); float8
    added to fp32 after every step (9.0).  On a CPU, where a double of the signature runs, that of
    8.0 with a coarse exponential."""
    wide = Numerics(
        softmax=Softmax(
            exp="exp_u20" if capability is None else "ex2.approx",
            # sm_scale, log2(e), and the products of these and of both factors
            scale_roundings=5,
            block_n=_KEYS,
            row_sum=RowSum(of="any"),
        ),
        output=Output(probability="float16"),
        quantised=Quantised(
            products="int8", query_tile=_BLOCK, key_tile=_BLOCK, floor=1e-7, centred="input"
        ),
    )
    if capability in (None, (8, 0)):
        return wide
    if capability == (8, 6):
        narrow = Products(accumulator="float16", score_accumulator="float32", promotion="block")
        return replace(wide, products=narrow)
    if capability == (9, 0):
        return replace(
            wide,
            products=Products(promotion="block"),
            softmax=replace(wide.softmax, block_n=2 * _KEYS),
            output=Output(probability="float8_e4m3fn"),
            # P is scaled by 2^8.807 in the exponent
            quantised=replace(wide.quantised, value_top=448.0, probability_top=447.88),
        )
    return _NARROW if capability in ((8, 9), (12, 0)) else _NONE


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
    lse=("return_lse", "natural"),
    numerics=numerics,
    no_gradients="SageAttention is for inference: its rounding to integers has no gradient",
)
