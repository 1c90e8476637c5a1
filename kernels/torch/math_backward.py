"""The backward of torch's composite attention: autograd through
`aten::_scaled_dot_product_attention_math`.

A composite has no backward kernel: autograd differentiates the two matrix products and the softmax
between them, which its own forward makes again.  Read off torch's derivatives
(`tools/autograd/derivatives.yaml`, `aten/src/ATen/native/SoftMax.cpp`, `cuda/SoftMax.cu`) and its
results:
- Everything between the casts is fp32, as in `math`: q and k times sqrt|scale| are what S, dQ and
  dK are products of.
- P is the softmax that the forward divided by its row sum.  dP = dO V^T, D = rowsum(P dP) rather
  than rowsum(dO O), and dS = P (dP - D) on a CPU, P dP - P D on CUDA.  No saved O or LSE is read.
- Heads of a group read copies of one key head, in fp32; their gradients are summed in fp32, and
  everything is rounded once.
- A row without a key has P = 0 exactly, hence no part in any gradient.
- A dP that overflows spreads to its whole row, from a masked key too: D adds 0 times infinity.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.torch import math
from kernels.torch.common import flag_or_bias
from verify.variant import (
    AttentionArgs,
    Contract,
    GradientNumerics,
    GradientProducts,
    Gradients,
    GradientSoftmax,
    GradientSums,
    Saved,
    ScoreGradient,
    Variant,
    Workspace,
)

SUPPORT = replace(math.SUPPORT)


def backward(
    args: AttentionArgs, saved: Saved, dout: Tensor, gradients: Gradients, workspace: Workspace
) -> None:
    """dQ, dK and dV by autograd; raises `Unsupported`."""
    SUPPORT.check_backward(args, saved, dout, gradients)
    causal, bias = flag_or_bias(args)
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (args.q, args.k, args.v)]
        out, _ = torch.ops.aten._scaled_dot_product_attention_math(
            *inputs, bias, 0.0, causal, scale=args.softmax_scale, enable_gqa=True
        )
        gradients.copy_(*torch.autograd.grad(out, inputs, dout))


VARIANT = Variant(
    name="torch-math-backward",
    family="torch",
    backward=backward,
    saved_by=math.VARIANT,
    support=SUPPORT,
    gradients=GradientNumerics(
        products=GradientProducts(operands="float32", prescale="sqrt"),
        softmax=GradientSoftmax(source="own", exp="vexp", probability="float32"),
        score_gradient=ScoreGradient(dtype="float32"),
        sums=GradientSums(block_m=0, block_n=0),
    ),
    contract=Contract(lse=None),
    allocates_outputs=True,
    available=math.VARIANT.available,
)

WITNESS = (
    {
        "case": (
            "torch-math-backward:default:gradients:b=2,hq=6,hkv=2,sq=1,skv=48,d=32,dtype=float16,"
            "mask=prefix.128,lq=bshd,lk=bshd,lv=bshd,lo=bshd,ldo=bshd,dist=decreasing,seed=250000"
        ),
        "tensor": "dv",
        "r": 0.999,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
    {
        "case": (
            "torch-math-backward:default:gradients:b=2,hq=6,hkv=2,sq=1,skv=48,d=32,dtype=float16,"
            "mask=prefix.128,lq=bshd,lk=bshd,lv=bshd,lo=bshd,ldo=bshd,dist=decreasing,seed=250000"
        ),
        "tensor": "dv",
        "r": 0.999,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
