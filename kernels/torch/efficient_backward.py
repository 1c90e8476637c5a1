"""The backward of torch's memory-efficient attention on CUDA,
`aten::_scaled_dot_product_efficient_attention_backward`.

It starts from what `efficient` saved.  The arithmetic is that of its source as torch carries it
(CUTLASS, from xFormers):
- S, dP and delta are fp32; S is scaled, the bias added, P = exp(S - LSE).  P is kept in shared
  memory in the input's dtype, and dS = P (dP - delta) is made of that rounded P.
- The scale multiplies dS before it is rounded to the input's dtype.
- Sums are fp32 over blocks of 32 to 128 rows and keys, in registers or, for dQ, in a workspace
  where blocks of keys that run side by side add in turn: the order is free, and dQ need not repeat.
- Products of fp32 operands are three tf32 products each, as in the forward.
- fp16 and bf16 read O as the forward leaves it, (batch, seqlen_q, heads, dim) without gaps,
  whatever its strides say: on an H100 with torch 2.11 any other layout gives a wrong dQ and dK (see
  docs/findings.md).  So O is copied into that one.
- LSEs are read up to a multiple of 32 rows; the rest must be +inf, so that P is 0 there.
- Head dims, masks, biases and alignment: as in `efficient`.  A row without a key has an LSE of 0,
  and exp(-inf - 0) is 0.
"""

import math

import torch
from torch import Tensor

from kernels.torch import efficient
from kernels.torch.common import check_grid, flag_or_bias, missing_cuda
from verify.variant import (
    AttentionArgs,
    Contract,
    GradientNumerics,
    GradientProducts,
    Gradients,
    GradientSums,
    Saved,
    ScoreGradient,
    Variant,
    Workspace,
)

_LSE_ROWS = 32


def _variant(saver: Variant) -> Variant:
    support = saver.support

    def backward(
        args: AttentionArgs, saved: Saved, dout: Tensor, gradients: Gradients, workspace: Workspace
    ) -> None:
        """dQ, dK and dV from O and natural LSE; raises `Unsupported`."""
        support.check_backward(args, saved, dout, gradients)
        check_grid(args, "heads_q")
        causal, bias = flag_or_bias(
            args, flag=not support.intersections, pitch_multiple=efficient.BIAS_PITCH
        )
        out = saved.out.transpose(1, 2).contiguous().transpose(1, 2)
        lse = torch.nn.functional.pad(saved.lse, (0, -args.seqlen_q % _LSE_ROWS), value=math.inf)
        seed, offset = (args.q.new_zeros((), dtype=torch.int64) for _ in range(2))
        found = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            *(
                dout,
                args.q,
                args.k,
                args.v,
                bias,
                out,
                lse,
                seed,
                offset,
                0.0,
                [True, True, True, False],
                causal,
            ),
            scale=args.softmax_scale,
        )
        gradients.copy_(*found[:3])

    return Variant(
        name=saver.name.replace("efficient", "efficient-backward"),
        family="torch",
        backward=backward,
        saved_by=saver,
        support=support,
        gradients=GradientNumerics(
            products=GradientProducts(float32_products="tf32x3"),
            score_gradient=ScoreGradient(of="rounded", scaled=True),
            sums=GradientSums(block_m=32, block_n=32, atomics=("dq",)),
        ),
        contract=Contract(deterministic_backward=False),
        allocates_outputs=True,
        available=lambda: missing_cuda("_scaled_dot_product_efficient_attention_backward"),
    )


VARIANTS = [_variant(saver) for saver in efficient.VARIANTS]

WITNESS = (
    {
        "case": (
            "torch-efficient-backward:default:gradients:hq=2,hkv=2,sq=431,skv=431,d=232,"
            "dtype=float16,mask=causal.tl,lq=bshd,lk=bshd,lv=bshd,lo=sbhd,ldo=sbhd,"
            "dist=below_sentinel,seed=39460"
        ),
        "tensor": "dv",
        "r": 1.0,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
    {
        "case": (
            "torch-efficient-backward-causal:default:gradients:b=2,sq=65,skv=65,d=16,"
            "dtype=bfloat16,mask=causal,scale=4.0,lq=bshd,lk=bshd,lv=bshd,lo=bshd,ldo=bshd,"
            "dist=low_rank,seed=3700"
        ),
        "tensor": "dq",
        "r": 0.992,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
