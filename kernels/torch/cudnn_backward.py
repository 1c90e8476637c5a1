"""The backward of cuDNN's fused attention through torch, `aten::_scaled_dot_product_cudnn_attention_backward`.

It starts from what `cudnn` saved.  cuDNN is closed; what is declared is what its manual says of the graph, and FlashAttention's
backward does:
- S, dP and delta are fp32; P and dS enter their products in the input's dtype; sums are fp32.
- dQ may be added up by atomics: nothing is promised to repeat.
- dK and dV of grouped heads are taken to be rounded for each query head before they are summed.
- A graph is built per shape, which takes 0.3 to 2 s the first time.
- Head dims, masks, biases, scales and alignment: as in `cudnn`.
"""

import torch
from torch import Tensor

from kernels.torch import cudnn
from kernels.torch.common import additive_bias, check_grid, missing_cuda, takes_causal_flag
from verify.variant import AttentionArgs, Contract, GradientNumerics, Gradients, Saved, Variant, Workspace


def _variant(saver: Variant) -> Variant:
    support = saver.support

    def backward(args: AttentionArgs, saved: Saved, dout: Tensor, gradients: Gradients, workspace: Workspace) -> None:
        """dQ, dK and dV from O and natural LSE; raises `Unsupported`."""
        support.check(args, saved.out, dout=dout, dq=gradients.dq, dk=gradients.dk, dv=gradients.dv)
        check_grid(args, "batch", "heads_q")
        causal = not support.intersections and takes_causal_flag(args)
        bias = additive_bias(args, cudnn.BIAS_PITCH) if support.intersections else None
        seed, offset = (args.q.new_zeros((), dtype=torch.int64) for _ in range(2))
        found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(dout, args.q, args.k, args.v, saved.out, saved.lse.unsqueeze(-1), seed, offset, bias, None, None),
            *(args.seqlen_q, args.seqlen_kv, 0.0, causal),
            scale=args.softmax_scale,
        )
        for gradient, value in zip((gradients.dq, gradients.dk, gradients.dv), found, strict=True):
            gradient.copy_(value)

    return Variant(
        name=saver.name.replace("cudnn", "cudnn-backward"),
        family="torch",
        backward=backward,
        saved_by=saver,
        support=support,
        gradients=GradientNumerics(block_m=64, block_n=32, scale_roundings=3, atomics=("dq",), group="cast"),
        contract=Contract(deterministic_backward=False),
        allocates_outputs=True,
        available=lambda: cudnn.available() or missing_cuda("_scaled_dot_product_cudnn_attention_backward"),
    )


VARIANTS = [_variant(saver) for saver in cudnn.VARIANTS]
