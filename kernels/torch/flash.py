"""torch's FlashAttention-2 on CUDA, `aten::_scaled_dot_product_flash_attention`.

The arithmetic is that of FlashAttention-2's source as torch carries it, the rest was seen on an
H100 with torch 2.11:
- fp16 and bf16 (fp32 and fp64 raise); head dims are multiples of 8 up to 256, equal for Q, K and V
  (others raise; the front end pads them).  Grouped heads are right, decoding included.
- S = QK^T accumulates in fp32 and is scaled inside the exponent, ex2.approx(S sigma - m sigma),
  sigma = float(scale) * float(log2 e).  The maximum is taken of unscaled scores, and masked and
  out-of-range ones are -inf before they are scaled: with a scale of zero or less, causal or ragged
  shapes give NaN and LSEs of inf, and full 128 x 128 overflows from -1 on. Hence positive scales
  only; from 0.001 to 30 they are right.
- P is un-normalised and rounded to the input's dtype; the row sum is of unrounded P.
- 32 keys per rescale is the smallest tile in the source (head dim 128, sm_86 and sm_89); sm_80 and
  sm_90 take 64 or 128.  Work may be split over the keys by a heuristic that looks at batch and
  heads: a slice of the batch differs in its bits at 1000 x 1000 (not at 65 x 100 or 1 x 4000).
  Repeats agree bitwise.
- `is_causal` is aligned to the bottom right corner, here alone among torch's kernels (the front end
  refuses it for seqlen_q != seqlen_kv).  A row without a key, and every row where seqlen_kv = 0,
  gives O = 0 and LSE = +inf.
- seqlen_q = 0 with keys is an invalid launch, so nothing is launched here; a batch or a head count
  of 70000 is one too.
- Rows are read 16 bytes at a time, unchecked: one that begins elsewhere is a misaligned-address
  fault, which ends the process's use of the device.  Any strides that keep to 16 bytes, expanded
  ones too, are right.
- A NaN in K reaches every row, in V every row's O; a NaN in a row of Q stays there.  O is then NaN,
  but the LSE of a row whose scores hold a NaN is +inf.
"""

import math

import torch
from torch import Tensor

from kernels.torch.common import check_grid, missing_cuda, takes_causal_flag
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

SUPPORT = Support(
    dtypes=("float16", "bfloat16"),
    head_dims=range(8, 257, 8),
    masks=("full", "causal", "causal.square"),
    grouped_heads=True,
    min_seqlen=0,
    scales="positive",
    layouts="aligned",
    devices=("cuda",),
    capability=(8, 0),
)


def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
    """O and natural LSE; raises `Unsupported`."""
    SUPPORT.check(args, out)
    check_grid(args, "batch", "heads_q")
    assert lse is not None
    if args.seqlen_q == 0:
        return
    found_out, found_lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        args.q, args.k, args.v, 0.0, takes_causal_flag(args, "br"), False, scale=args.softmax_scale
    )
    out.copy_(found_out)
    lse.copy_(found_lse)


def available() -> str | None:
    """Why it cannot run here, or None."""
    if torch.cuda.is_available() and not torch.backends.cuda.is_flash_attention_available():
        return f"torch {torch.__version__} was built without FlashAttention"
    return missing_cuda("_scaled_dot_product_flash_attention")


VARIANT = Variant(
    name="torch-flash",
    family="torch",
    forward=forward,
    support=SUPPORT,
    numerics=Numerics(
        softmax=Softmax(block_n=32, scale_roundings=3), output=Output(split_keys=True)
    ),
    contract=Contract(empty_row_lse=math.inf, nan="out", batch_invariant=False),
    allocates_outputs=True,
    available=available,
)

WITNESS = (
    {
        "case": (
            "torch-flash:default:accuracy:hq=5,sq=320,skv=33,d=248,dtype=float16,mask=causal,"
            "dist=low_rank,seed=5795"
        ),
        "tensor": "out",
        "r": 0.95,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
