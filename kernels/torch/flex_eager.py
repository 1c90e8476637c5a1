"""FlexAttention without a compiler: `torch.nn.attention.flex_attention.flex_attention` called
eagerly, on the CPU.

The reference arithmetic that FlexAttention's users debug with; read off torch's Python
(`_higher_order_ops/flex_attention.py`, `math_attention`) and its results (torch 2.13, CPU):
- 2.13 raises q and k to fp32 before the product; older releases round the scores to the input's
  dtype, and are declared so.
- The scale multiplies fp32 scores; softcap and mask follow, each element by element: NaN in a
  masked key has no effect.
- P is divided by the row sum, rounded to the input's dtype (bitwise torch.softmax(fp32).to(dtype)),
  then meets V in a product of that dtype with an fp32 accumulator.  0 * NaN: NaN in a masked value
  spreads.
- In bf16 on CPUs with AVX512_BF16 that product (oneDNN, VDPBF16PS) takes subnormal operands for
  zero and flushes subnormal results: a V of -1.2e-38 gives O = 0.  The blocked CPU kernel's
  product, MKL's, does not.
- LSE = logsumexp / ln 2 * ln 2, one division and one product more than a plain one; -inf for an
  empty row, whose O is 0.
- seqlen_q = 0 or seqlen_kv = 0 raises IndexError in torch, or returns no LSE.

Called eagerly, torch would trace through Dynamo for every new shape (0.2 s).  The flag that torch
offers to debug score_mods skips that and changes no bit of the result.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from kernels.torch.common import BIAS_MASKS, has_part
from references.masks import Dense, Full, Lengths
from verify.variant import (
    AttentionArgs,
    Contract,
    Numerics,
    Output,
    Products,
    Softmax,
    Support,
    Variant,
    Workspace,
)

SUPPORT = Support(
    dtypes=("float32", "float16", "bfloat16"),
    head_dims=range(1, 513),
    masks=BIAS_MASKS,
    intersections=True,
    grouped_heads=True,
    separate_head_dim_v=True,
    score_mods=("softcap",),
    devices=("cpu",),
)
RAISES_OPERANDS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def softcap(
    cap: float | Tensor, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor
) -> Tensor:
    """The score_mod cap * tanh(score / cap)."""
    return cap * torch.tanh(score / cap)


@contextmanager
def _untraced() -> Iterator[None]:
    before = flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
    """O and natural LSE by eager flex_attention; raises `Unsupported`."""
    SUPPORT.check(args, out)
    assert lse is not None
    block_mask = None
    if not isinstance(args.mask, Full):
        # Blocks are shared by the sequences and heads that a mask cannot tell apart.
        by_head = has_part(args, Dense)
        by_sequence = by_head or has_part(args, Lengths)
        lengths = args.seqlen_q, args.seqlen_kv
        mod = args.mask.mod(*lengths, args.q.device)
        batch, heads = args.batch if by_sequence else None, args.heads_q if by_head else None
        block_mask = flex.create_block_mask(mod, batch, heads, *lengths, device=args.q.device)
    score_mod: Callable[..., Tensor] | None = (
        partial(softcap, args.softcap) if args.softcap else None
    )
    with _untraced():
        found_out, aux = flex.flex_attention(
            args.q,
            args.k,
            args.v,
            score_mod=score_mod,
            block_mask=block_mask,
            scale=args.softmax_scale,
            enable_gqa=args.heads_q != args.heads_kv,
            return_aux=flex.AuxRequest(lse=True),
        )
    out.copy_(found_out)
    assert aux.lse is not None
    lse.copy_(aux.lse)


def available() -> str | None:
    """Why this torch cannot run it, or None."""
    parts = ("AuxRequest", "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG")
    missing = [name for name in parts if not hasattr(flex, name)]
    return (
        f"torch {torch.__version__}: flex_attention has no {' and no '.join(missing)}"
        if missing
        else None
    )


VARIANT = Variant(
    name="torch-flex-eager",
    family="torch",
    forward=forward,
    support=SUPPORT,
    numerics=Numerics(
        products=Products(operands="float32" if RAISES_OPERANDS else "input"),
        softmax=Softmax(scores="float32" if RAISES_OPERANDS else "input", exp="vexp", block_n=0),
        output=Output(normalised=True),
    ),
    contract=Contract(batch_invariant=False),
    allocates_outputs=True,
    available=available,
)

WITNESS = (
    {
        "case": (
            "torch-flex-eager:default:accuracy:hq=7,sq=300,skv=64,d=63,dtype=float16,"
            "mask=causal.tl+lengths.65.42,scale=0.75,softcap=20.0,lq=bshd,lk=bshd,lv=bshd,lo=bshd,"
            "ldo=bshd,dist=subnormals,seed=289"
        ),
        "tensor": "out",
        "r": 0.948,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
)
