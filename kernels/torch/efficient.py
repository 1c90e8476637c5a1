"""torch's memory-efficient attention on CUDA (CUTLASS, from xFormers),
`aten::_scaled_dot_product_efficient_attention`.

The arithmetic is that of its source as torch carries it, the rest was seen on an H100 with torch
2.11:
- fp16, bf16 and fp32 (fp64 raises).  fp32 products are three tf32 products each (CUTLASS
  OpMultiplyAddFastF32), with errors of 4e-7 to 2e-6 on normal values; subnormals keep no more than
  tf32's quantum, 2^-136.
- Head dims are multiples of 8 (others raise) with no largest one, 512 seen; V's may differ; grouped
  heads raise.
- Scores accumulate in fp32.  With a bias they are scaled, the bias (in the input's dtype) is added
  and the maximum taken; without one they are scaled by float(scale * log2 e) inside the softmax.
  Exponential ex2.approx, P un-normalised in the input's dtype for PV, row sum unrounded, 64 or 128
  keys per rescale.  Every scale is right, negative ones and zero included, with `is_causal` too.
- `is_causal` is aligned to the top left corner: the "-causal" variant takes it, and skips blocks of
  keys; the other one hands every mask over as a bias.  A bias raises unless its rows are a multiple
  of 8 elements apart; here, as in the front end, 16.
- The LSE's seqlen is padded to a multiple of 32.  A row whose bias is all -inf gives O = 0 and LSE
  = 0, not -inf.  With seqlen_kv = 0 O is 0, but the LSE is whatever was in memory: lengths from 1
  on.
- Rows must begin at multiples of 16 bytes.  Others raise or, those of V and some of Q and K, are
  misaligned-address faults.
- 70000 heads are an invalid launch; a batch of 70000 is right.
- Repeats, and slices of a batch, agree bitwise: 65 x 100, 1 x 4000, 1000 x 1000.
- A NaN or infinity at a masked key spreads; huge finite values there change no bit.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.torch.common import BIAS_MASKS, check_grid, flag_or_bias, missing_cuda
from verify.variant import (
    AttentionArgs,
    Contract,
    Numerics,
    Products,
    Softmax,
    Support,
    Variant,
    Workspace,
)

BIAS_SUPPORT = Support(
    dtypes=("float32", "float16", "bfloat16"),
    head_dims=range(8, 513, 8),
    masks=BIAS_MASKS,
    intersections=True,
    separate_head_dim_v=True,
    layouts="aligned",
    devices=("cuda",),
    capability=(8, 0),
)
FLAG_SUPPORT = replace(
    BIAS_SUPPORT, masks=("full", "causal.tl", "causal.square"), intersections=False
)
BIAS_PITCH = 16


def _variant(name: str, support: Support) -> Variant:
    def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
        """O and natural LSE; raises `Unsupported`."""
        support.check(args, out)
        check_grid(args, "heads_q")
        assert lse is not None
        causal, bias = flag_or_bias(args, flag=not support.intersections, pitch_multiple=BIAS_PITCH)
        found_out, found_lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            args.q, args.k, args.v, bias, True, 0.0, causal, scale=args.softmax_scale
        )
        out.copy_(found_out)
        lse.copy_(found_lse[..., : args.seqlen_q])

    return Variant(
        name=name,
        family="torch",
        forward=forward,
        support=support,
        numerics=Numerics(
            products=Products(float32_products="tf32x3"),
            softmax=Softmax(block_n=64, scale_roundings=3),
        ),
        contract=Contract(empty_row_lse=0.0),
        allocates_outputs=True,
        available=lambda: missing_cuda("_scaled_dot_product_efficient_attention"),
    )


VARIANTS = [
    _variant("torch-efficient", BIAS_SUPPORT),
    _variant("torch-efficient-causal", FLAG_SUPPORT),
]

WITNESS = (
    {
        "case": (
            "torch-efficient:default:accuracy:b=4,hq=2,hkv=2,sq=113,skv=63,d=328,dtype=bfloat16,"
            "mask=causal,dist=subnormals,seed=18556"
        ),
        "tensor": "out",
        "r": 0.948,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
    {
        "case": (
            "torch-efficient-causal:default:accuracy:hq=2,hkv=2,sq=256,skv=128,d=512,"
            "dtype=float16,mask=causal.tl,scale=-1.0,lq=sbhd,lk=sbhd,lv=sbhd,lo=sbhd,ldo=sbhd,"
            "dist=subnormals,seed=99"
        ),
        "tensor": "out",
        "r": 0.978,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
