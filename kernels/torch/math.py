"""torch's composite attention, `aten::_scaled_dot_product_attention_math`: two matrix products
around a softmax, in fp32.

Read off the operator's results (torch 2.13 on a CPU, 2.11 on an H100) and its source; one
declaration holds for both devices:
- fp16 and bf16 inputs are raised to fp32 first, unless
  torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True) was called; on CUDA the fp32 products
  are IEEE unless TF32 was allowed (errors of 5e-7 to 9e-7 in fp32).
- q and k are each multiplied by sqrt|scale| in fp32, and q by the sign of the scale too: zero and
  negative scales are right.
- P is divided by the row sum before it meets V, and stays fp32; one rounding to q's dtype at the
  end.
- exp measured through the operator on a CPU, 200,000 arguments in [-87.3, -17.4]: at most 0.96 ulp,
  subnormal results included. On CUDA it is CUDA's expf, 2 ulp: the same bound.
- A boolean mask would be *added* to the scores: the front end turns it into a bias before, and so
  does this file.
- `is_causal` is aligned to the top left corner.
- The softmax is the "safe" one: a row without a key, or seqlen_kv = 0, gives exactly 0.
- On CUDA any head dim (4 to 512 seen), any strides and offsets, grouped heads, and 70000 sequences
  or heads are right too.
- A masked NaN spreads, and so does a masked key whose product with a query overflows fp32: (+inf) +
  (-inf).
- Batch slices differ from the batch in the last bit on a CPU: the BLAS behind it chooses its kernel
  by shape and alignment.
"""

import torch
from torch import Tensor

from kernels.torch.common import BIAS_MASKS, flag_or_bias, missing_operator
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
    min_seqlen=0,
)


def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
    """O by aten::_scaled_dot_product_attention_math, which returns no log-sum-exp; raises
    `Unsupported`."""
    SUPPORT.check(args, out)
    causal, bias = flag_or_bias(args)
    out.copy_(
        torch.ops.aten._scaled_dot_product_attention_math(
            args.q, args.k, args.v, bias, 0.0, causal, scale=args.softmax_scale, enable_gqa=True
        )[0]
    )


VARIANT = Variant(
    name="torch-math",
    family="torch",
    forward=forward,
    support=SUPPORT,
    numerics=Numerics(
        products=Products(operands="float32", prescale="sqrt"),
        softmax=Softmax(exp="vexp", block_n=0),
        output=Output(probability="float32", normalised=True),
    ),
    contract=Contract(lse=None, batch_invariant=False),
    allocates_outputs=True,
    available=lambda: missing_operator("_scaled_dot_product_attention_math"),
)

WITNESS = (
    {
        "case": (
            "torch-math:default:accuracy:b=4,hq=2,hkv=2,sq=192,skv=96,d=71,dtype=float16,"
            "mask=window.16.7+documents.5_91,lq=bshd,lk=bshd,lv=bshd,lo=bshd,ldo=bshd,"
            "dist=low_rank,seed=479001599"
        ),
        "tensor": "out",
        "r": 0.996,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
    {
        "case": (
            "torch-math:default:accuracy:b=4,hq=2,hkv=2,sq=192,skv=96,d=71,dtype=float16,"
            "mask=window.16.7+documents.5_91,lq=bshd,lk=bshd,lv=bshd,lo=bshd,ldo=bshd,"
            "dist=low_rank,seed=479001599"
        ),
        "tensor": "out",
        "r": 0.996,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
