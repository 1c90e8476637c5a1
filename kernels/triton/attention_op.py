"""The Triton kernels as an operator of torch with autograd:

    from kernels.triton.attention_op import flash_attention

    out, lse = flash_attention(q, k, v, mask="causal")

q is (batch, heads_q, seqlen_q, head_dim), k and v (batch, heads_kv, seqlen_kv, head_dim), any
strides but the innermost; heads_q is a multiple of heads_kv.  mask is a mask's name
(`references.masks.parse_mask`): "causal" is aligned to the last key, "causal.tl" to the first;
"window.128.0", "lengths.70_90.100_33" and "causal+documents.50_30" are others.  `softmax_scale` is
head_dim ** -0.5 unless it is given.  lse is the natural log-sum-exp, float32 (batch, heads_q,
seqlen_q), and takes no gradient.

`flash_forward` and `flash_backward` say what is computed and in which order: the gradients repeat
bit for bit.  Raises `Unsupported` outside their support.  torch.compile, FakeTensor and
torch.autograd see two operators, `attention_verify::flash_attention` and its backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.triton import flash_backward, flash_forward
from references.masks import parse_mask
from verify.variant import AttentionArgs, Config, Gradients, Saved


@torch.library.custom_op("attention_verify::flash_attention", mutates_args=())
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: str = "full", softmax_scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """O (batch, heads_q, seqlen_q, head_dim_v), contiguous and in q's dtype, and the LSE."""
    out, lse = _outputs(q, k, v, mask, softmax_scale)
    args = _args(q, k, v, mask, softmax_scale, flash_forward.VARIANT.configs[0])
    flash_forward.forward(args, out, lse, {})
    return out, lse


@flash_attention.register_fake
def _outputs(
    q: Tensor, k: Tensor, v: Tensor, mask: str = "full", softmax_scale: float | None = None
) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("attention_verify::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: str,
    softmax_scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV, contiguous."""
    gradients = Gradients(*_gradients(dout, q, k, v, out, lse, mask, softmax_scale))
    args = _args(q, k, v, mask, softmax_scale, flash_backward.HOPPER)
    if dout.stride(-1) != 1:  # that of a sum is expanded
        dout = dout.contiguous()
    workspace = {"delta": torch.empty_like(lse)}
    saved = Saved(out, lse)
    flash_backward.backward(flash_backward.TWO_PASS, args, saved, dout, gradients, workspace)
    return gradients.dq, gradients.dk, gradients.dv


@flash_attention_backward.register_fake
def _gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: str,
    softmax_scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _args(
    q: Tensor, k: Tensor, v: Tensor, mask: str, softmax_scale: float | None, config: Config
) -> AttentionArgs:
    return AttentionArgs(
        q=q,
        k=k,
        v=v,
        mask=parse_mask(mask),
        softmax_scale=q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale,
        score_mod=None,
        config=config,
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.mask, ctx.softmax_scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    gradients = flash_attention_backward(dout, *ctx.saved_tensors, ctx.mask, ctx.softmax_scale)
    return (*gradients, None, None)


flash_attention.register_autograd(_backward, setup_context=_save)
