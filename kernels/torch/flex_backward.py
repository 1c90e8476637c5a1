"""The backward of torch's compiled FlexAttention on CUDA, Inductor's Triton template
`flex_attention_backward`.

It runs as its users run it, `torch.compile(flex_attention)` and `torch.autograd.grad`.  What
autograd has saved of its own forward, O and the LSE in base 2, is overwritten in between with what
`flex_compiled` saved.

From torch's source (2.11; 2.13 differs in nothing that follows):
- S, P = exp2 (ex2.approx), dP and dS = P (dP - delta) are fp32; P and dS are rounded to the input's
  dtype for their products. delta is a kernel before that: products and sums in fp32, kept in fp32.
- The derivative of the score_mod multiplies dS before it is rounded, and the scale is part of it.
  With a softcap c that is times c, times 1 - tanh^2, divided by c (2 ulps): five roundings more
  than the formula has.
- One launch, no atomics.  Some blocks hold 128 keys (64 on an A100) and sum dK and dV in fp32 over
  64 rows at a time, all query heads of their key head in turn; others hold as many rows and sum dQ
  over 64 keys at a time.
- Where a mask hides a pair, dS is 0, and 0 * NaN spreads within a block, as in the forward.  An LSE
  of -inf counts as 0.

Sizes, masks, scale and softcap come to torch as in `flex_compiled`, so there are as few graphs.
The query heads that fill a group up, and surplus key heads, bring dO = 0, O = 0 and an LSE of +inf,
hence P = 0: they add 0 to dK and dV, and what they get themselves is dropped.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import pad
from torch.utils.dlpack import from_dlpack

from kernels.torch import flex_compiled
from kernels.torch.common import GRID
from kernels.torch.flex_compiled import GROUP, OPTIONS, PAIR, SUPPORT
from verify.variant import (
    AttentionArgs,
    GradientNumerics,
    Gradients,
    GradientSoftmax,
    GradientSums,
    Saved,
    ScoreGradient,
    Unsupported,
    Variant,
    Workspace,
)


def _scaled_and_capped(scale: Tensor, cap: Tensor, capped: Tensor) -> Callable[..., Tensor]:
    """As `flex_compiled` has it, but for a cap of 1 where there is none: 0 / cap is part of the
    derivative even then."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        scaled = score * scale
        return torch.where(capped, cap * torch.tanh(scaled / cap), scaled)

    return score_mod


def _framed(tensor: Tensor, width: int, count: int, value: float) -> Tensor:
    """(key heads, group, ...) as (pairs, 2 * width, ...): surplus query heads and key heads hold
    that value."""
    heads, group = tensor.shape[:2]
    filled = pad(
        tensor, (0, 0) * (tensor.dim() - 2) + (0, width - group, 0, count - heads), value=value
    )
    return from_dlpack(filled.reshape(count // PAIR, PAIR * width, *tensor.shape[2:]))


def _block_mask(low: Tensor, high: Tensor, seqlen_kv: int) -> flex.BlockMask:
    """That of the forward, with the blocks of queries that see each block of keys."""
    made = flex_compiled._block_mask(low, high, seqlen_kv)
    return flex.BlockMask.from_kv_blocks(
        made.kv_num_blocks,
        made.kv_indices,
        made.full_kv_num_blocks,
        made.full_kv_indices,
        BLOCK_SIZE=made.BLOCK_SIZE,
        mask_mod=made.mask_mod,
        seq_lengths=made.seq_lengths,
    )


def _overwrite(found: Tensor, out: Tensor, lse: Tensor) -> None:
    """Make the backward of `found`, a result of compiled flex_attention, read this O and natural
    LSE."""
    assert found.grad_fn is not None
    saved = found.grad_fn.saved_tensors
    outs = [t for t in saved if t.data_ptr() == found.data_ptr()]
    lses = [t for t in saved if t.dtype == torch.float32 and t.shape == lse.shape]
    if (len(outs), len(lses)) != (1, 1) or outs[0].shape != out.shape:
        raise RuntimeError(
            f"torch {torch.__version__} saved {len(outs)} tensors like O and {len(lses)} like"
            " its LSE"
        )
    # `data` has no version counter, by which autograd would refuse tensors that were written to.
    outs[0].data.copy_(out)
    lses[0].data.copy_(lse.double() * math.log2(math.e))


def backward(
    args: AttentionArgs, saved: Saved, dout: Tensor, gradients: Gradients, workspace: Workspace
) -> None:
    """dQ, dK and dV from O and natural LSE; raises `Unsupported`."""
    SUPPORT.check_backward(args, saved, dout, gradients)
    with torch.cuda.device_of(args.q):  # DLPack hands out tensors of the current device alone
        _backward(args, saved, dout, gradients)


def _backward(args: AttentionArgs, saved: Saved, dout: Tensor, gradients: Gradients) -> None:
    group, heads = args.heads_q // args.heads_kv, args.batch * args.heads_kv
    if heads > GRID:
        raise Unsupported("batch", f"{heads} key heads in all are more than {GRID}")
    width = 1 if group == 1 else -(-group // GROUP) * GROUP
    count = max(-(-heads // PAIR), 2) * PAIR
    paired = flex_compiled._paired
    q = paired(args.q.view(heads, group, args.seqlen_q, -1), width, count)
    k, v = (paired(t.view(heads, 1, args.seqlen_kv, -1), 1, count) for t in (args.k, args.v))
    low, high = (
        paired(row[:, None, None].expand(-1, args.heads_kv, width, -1).flatten(0, 1), width, count)
        for row in args.mask.row_bounds(args.batch, args.seqlen_q, args.seqlen_kv, q.device)
    )
    out, grown = (
        _framed(t.view(heads, group, args.seqlen_q, -1), width, count, 0.0)
        for t in (saved.out, dout)
    )
    lse = _framed(saved.lse.view(heads, group, args.seqlen_q), width, count, math.inf)
    scale, cap = (
        q.new_tensor(x, dtype=torch.float32) for x in (args.softmax_scale, args.softcap or 1.0)
    )
    capped = q.new_tensor(args.softcap > 0, dtype=torch.bool)
    with torch.enable_grad():
        inputs = tuple(t.requires_grad_() for t in (q, k, v))
        found = flex_compiled._compiled()(
            *inputs,
            score_mod=_scaled_and_capped(scale, cap, capped),
            block_mask=_block_mask(low, high, args.seqlen_kv),
            scale=1.0,
            enable_gqa=group > 1,
            kernel_options=OPTIONS,
        )
        _overwrite(found, out, lse)
        dq, dk, dv = torch.autograd.grad(found, inputs, grown)
    gradients.copy_(
        dq.reshape(count, width, args.seqlen_q, -1)[:heads, :group].reshape(args.q.shape),
        *(t.reshape(count, args.seqlen_kv, -1)[:heads].reshape(args.k.shape) for t in (dk, dv)),
    )


VARIANT = Variant(
    name="torch-flex-backward",
    family="torch",
    backward=backward,
    saved_by=flex_compiled.VARIANT,
    support=SUPPORT,
    gradients=GradientNumerics(
        softmax=GradientSoftmax(scale_roundings=3, softcap_tanh="tanhf"),
        score_gradient=ScoreGradient(scaled=True),
        sums=GradientSums(
            block_m=64,
            block_n=64,
            roundings=5,  # those of dS beside a softcap; the finished sums are multiplied by 1
        ),
    ),
    allocates_outputs=True,
    available=flex_compiled.available,
)

WITNESS = (
    {
        "case": (
            "torch-flex-backward:default:gradients:b=2,hq=2,hkv=2,sq=2,skv=65,d=128,dtype=float16,"
            "mask=prefix.70,dist=subnormals,seed=2295"
        ),
        "tensor": "dk",
        "r": 0.997,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
