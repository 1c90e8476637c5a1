"""The backward of torch's FlashAttention-2 on CUDA,
`aten::_scaled_dot_product_flash_attention_backward`.

It starts from what `flash` saved.  The arithmetic is that of FlashAttention-2's source as torch
carries it:
- S and dP accumulate in fp32; P = ex2.approx(S sigma - LSE log2 e), delta and dS = P (dP - delta)
  are fp32; P and dS are rounded to the input's dtype for their products.
- A block of 32 to 128 keys keeps its dK and dV in registers, in fp32, over blocks of 64 or 128
  rows.  Its share of dQ is added to an fp32 buffer by atomics: the order of addition is free, and
  dQ does not repeat.  The scale multiplies finished sums.
- dK and dV of grouped heads are rounded to the input's dtype for each query head, and summed by
  torch.
- Head dims, scales, masks and alignment: as in `flash`.  A row without a key has an LSE of +inf,
  hence P = 0.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.torch import flash
from kernels.torch.common import check_grid, missing_cuda, takes_causal_flag
from verify.variant import (
    AttentionArgs,
    Contract,
    GradientNumerics,
    Gradients,
    GradientSoftmax,
    GradientSums,
    Saved,
    Variant,
    Workspace,
)

SUPPORT = replace(flash.SUPPORT, min_seqlen=1)


def backward(
    args: AttentionArgs, saved: Saved, dout: Tensor, gradients: Gradients, workspace: Workspace
) -> None:
    """dQ, dK and dV from O and natural LSE; raises `Unsupported`."""
    SUPPORT.check_backward(args, saved, dout, gradients)
    check_grid(args, "batch", "heads_q")
    seed, offset = args.q.new_zeros(2, dtype=torch.uint64), args.q.new_zeros((), dtype=torch.uint64)
    found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *(
            dout,
            args.q,
            args.k,
            args.v,
            saved.out,
            saved.lse,
            None,
            None,
            args.seqlen_q,
            args.seqlen_kv,
        ),
        *(0.0, takes_causal_flag(args, "br"), seed, offset),
        scale=args.softmax_scale,
    )
    gradients.copy_(*found)


def available() -> str | None:
    """Why it cannot run here, or None."""
    return flash.available() or missing_cuda("_scaled_dot_product_flash_attention_backward")


VARIANT = Variant(
    name="torch-flash-backward",
    family="torch",
    backward=backward,
    saved_by=flash.VARIANT,
    support=SUPPORT,
    gradients=GradientNumerics(
        softmax=GradientSoftmax(scale_roundings=3),
        sums=GradientSums(block_m=64, block_n=32, atomics=("dq",), group="cast"),
    ),
    contract=Contract(deterministic_backward=False),
    allocates_outputs=True,
    available=available,
)

WITNESS = (
    {
        "case": (
            "torch-flash-backward:default:gradients:b=2,hq=2,hkv=2,sq=17,skv=316,d=256,"
            "dtype=float16,mask=causal,dist=subnormals,seed=931399339"
        ),
        "tensor": "dk",
        "r": 0.995,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
