"""cuDNN's fused attention through torch, `aten::_scaled_dot_product_cudnn_attention`.

cuDNN is closed: the arithmetic is what its manual and torch's wrapper say, the rest was seen on an
H100 with torch 2.11 and cuDNN 9.19:
- fp16 and bf16.  fp32 and fp64 raise nothing and return NaN and garbage.
- Head dims are multiples of 8 (others raise), with any mask right from 8 to 512; those above 256
  are left out, because a graph takes seconds to build there.  V's head dim may differ, but where q
  is expanded over the batch torch then allocates O with strides that cuDNN refuses, or the process
  dies with SIGSEGV: hence one head dim.
- The graph is scores, scale, mask, softmax, PV, each in fp32 but for P, which enters PV in the
  input's dtype; 64 keys per rescale or more.  A graph is built per shape (0.3 to 2 s the first
  time), its engine chosen by heuristics: no promise that a slice of a batch has the batch's bits,
  though it had at 65 x 100, 1 x 4000 and 1000 x 1000.  With one query and 400 keys or more the LSE
  of two runs may differ in its last bit, with a bias too; all other repeats agreed.
- Without a bias a scale of zero or less is wrong where FlashAttention-2's is: NaN for causal and
  ragged shapes.  Hence positive scales; from 0.001 to 30 they are right.  With a bias every scale
  is right.  So the "-bias" variant hands every mask over as a bias, the full one as zeros.
- `is_causal` is aligned to the top left corner.
- The LSE is natural, (batch, heads_q, seqlen_q, 1).  A row whose bias is all -inf gives O = 0 and
  LSE = -inf.
- A length of 0 returns no tensors at all.  A batch or a head count of 70000 raises.
- Rows must begin at multiples of 16 bytes: others raise nothing and give wrong results.  Any
  strides that keep to 16 bytes, expanded ones too, are right; the bias may have any pitch.
- A NaN or infinity at a masked key spreads; huge finite values there change no bit.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.torch.common import (
    BIAS_MASKS,
    additive_bias,
    check_grid,
    missing_cuda,
    takes_causal_flag,
)
from verify.variant import (
    AttentionArgs,
    Contract,
    Numerics,
    Output,
    Softmax,
    Support,
    Variant,
    Workspace,
)

FLAG_SUPPORT = Support(
    dtypes=("float16", "bfloat16"),
    head_dims=range(8, 257, 8),
    masks=("full", "causal.tl", "causal.square"),
    grouped_heads=True,
    scales="positive",
    layouts="aligned",
    devices=("cuda",),
    capability=(8, 0),
)
BIAS_SUPPORT = replace(
    FLAG_SUPPORT,
    masks=BIAS_MASKS,
    intersections=True,
    scales="any",
)
BIAS_PITCH = 16  # as the front end makes it


def available() -> str | None:
    """Why it cannot run here, or None."""
    if torch.cuda.is_available() and not torch._C._has_cudnn:
        return f"torch {torch.__version__} was built without cuDNN"
    return missing_cuda("_scaled_dot_product_cudnn_attention")


def _variant(name: str, support: Support) -> Variant:
    def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
        """O and natural LSE; raises `Unsupported`."""
        support.check(args, out)
        check_grid(args, "batch", "heads_q")
        assert lse is not None
        causal = not support.intersections and takes_causal_flag(args)
        bias = additive_bias(args, BIAS_PITCH) if support.intersections else None
        found_out, found_lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            args.q, args.k, args.v, bias, True, 0.0, causal, False, scale=args.softmax_scale
        )
        out.copy_(found_out)
        lse.copy_(found_lse.view(lse.shape))

    return Variant(
        name=name,
        family="torch",
        forward=forward,
        support=support,
        numerics=Numerics(
            softmax=Softmax(block_n=64, scale_roundings=3), output=Output(split_keys=True)
        ),
        contract=Contract(batch_invariant=False, deterministic=False),
        allocates_outputs=True,
        available=available,
    )


VARIANTS = [_variant("torch-cudnn", FLAG_SUPPORT), _variant("torch-cudnn-bias", BIAS_SUPPORT)]

WITNESS = (
    {
        "case": (
            "torch-cudnn:default:accuracy:b=3,hq=9,hkv=3,sq=80,skv=80,d=72,dtype=bfloat16,lq=bshd,"
            "lk=bshd,lv=bshd,lo=bshd,ldo=bshd,dist=one_hot_v,seed=36135"
        ),
        "tensor": "out",
        "r": 0.934,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
    {
        "case": (
            "torch-cudnn-bias:default:accuracy:hq=8,sq=16,skv=329,d=104,dtype=float16,scale=-1.0,"
            "dist=one_hot_v,seed=2074829091"
        ),
        "tensor": "out",
        "r": 0.967,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
