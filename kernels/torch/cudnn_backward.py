"""The backward of cuDNN's fused attention through torch,
`aten::_scaled_dot_product_cudnn_attention_backward`.

It starts from what "torch-cudnn" saved.  cuDNN is closed; what is declared is what its manual says
of the graph, and what FlashAttention's backward does:
- S, dP and delta are fp32; P and dS enter their products in the input's dtype; sums are fp32.  The
  scale multiplies dS before it is rounded: fp16 loses more of a dS below its normal range than of
  one that waits for it.
- dQ may be added up by atomics: nothing is promised to repeat.  On an H100 it did not at 200 x 500.
- dK and dV of grouped heads are taken to be rounded for each query head before they are summed.
- A graph is built per shape and layout of Q, K and V, which takes 0.3 to 2 s the first time; torch
  finds it again by these alone.  An O or dO in another layout would be read by the strides of the
  first one, so both are always copied into one layout.
- No mask is handed over as a bias here: with one a scale of zero or less gives NaN, and in fp16 so
  do rows whose LSE is below -10 or so (see docs/findings.md).
- 1 x 1 is refused ("s_q = s_kv = 1 is not supported"), hence lengths from 2.
- Head dims, scales, `is_causal` and alignment: as in `cudnn`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.torch import cudnn
from kernels.torch.common import check_grid, missing_cuda, takes_causal_flag
from verify.variant import (
    AttentionArgs,
    Contract,
    GradientNumerics,
    Gradients,
    GradientSoftmax,
    GradientSums,
    Saved,
    ScoreGradient,
    Variant,
    Workspace,
)

SUPPORT = replace(cudnn.FLAG_SUPPORT, min_seqlen=2)


def backward(
    args: AttentionArgs, saved: Saved, dout: Tensor, gradients: Gradients, workspace: Workspace
) -> None:
    """dQ, dK and dV from O and natural LSE; raises `Unsupported`."""
    SUPPORT.check_backward(args, saved, dout, gradients)
    check_grid(args, "batch", "heads_q")
    seed, offset = (args.q.new_zeros((), dtype=torch.int64) for _ in range(2))
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(
            dout.contiguous(),
            args.q,
            args.k,
            args.v,
            saved.out.contiguous(),
            saved.lse.unsqueeze(-1),
            seed,
            offset,
        ),
        *(None, None, None, args.seqlen_q, args.seqlen_kv, 0.0, takes_causal_flag(args)),
        scale=args.softmax_scale,
    )
    gradients.copy_(*found)


def available() -> str | None:
    """Why it cannot run here, or None."""
    return cudnn.available() or missing_cuda("_scaled_dot_product_cudnn_attention_backward")


VARIANT = Variant(
    name="torch-cudnn-backward",
    family="torch",
    backward=backward,
    saved_by=cudnn.VARIANTS[0],
    support=SUPPORT,
    gradients=GradientNumerics(
        softmax=GradientSoftmax(scale_roundings=3),
        score_gradient=ScoreGradient(scaled=True),
        sums=GradientSums(block_m=64, block_n=32, atomics=("dq",), group="cast"),
    ),
    contract=Contract(deterministic_backward=False),
    allocates_outputs=True,
    available=available,
)

WITNESS = (
    {
        "case": (
            "torch-cudnn-backward:default:gradients:b=2,hq=2,hkv=2,sq=2,skv=160,d=144,"
            "dtype=float16,dist=subnormals,seed=160"
        ),
        "tensor": "dk",
        "r": 0.999,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
