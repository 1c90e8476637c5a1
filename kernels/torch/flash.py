"""torch's FlashAttention-2 on CUDA, `aten::_scaled_dot_product_flash_attention`.

From FlashAttention-2 as torch carries it; what an H100 has to confirm is marked (?):
- fp16 and bf16; head dims are multiples of 8 up to 256 (the front end pads the others) and equal for Q, K and V.
- S = QK^T accumulates in fp32 and is scaled inside the exponent, ex2.approx(S sigma - m sigma), sigma = float(scale) *
  float(log2 e).  The maximum is taken of unscaled scores, so a negative scale can overflow; masked and out-of-range scores are
  -inf before they are scaled, so a scale of zero makes NaN of them and a negative one +inf (?).  Hence positive scales only.
- P is un-normalised and rounded to the input's dtype; the row sum is of unrounded P.
- 32 keys per rescale is the smallest tile in use (head dim 128, sm_86 and sm_89); sm_80 and sm_90 take 64 or 128.  Short
  queries are split over the keys, by a heuristic that looks at batch and heads: no batch invariance.
- `is_causal`: torch refuses it in the front end for seqlen_q != seqlen_kv, where FlashAttention >= 2.1 aligns to the bottom
  right corner; it is declared square only.  No masks else, so no empty rows.
- Rows are read 16 bytes at a time without a check: misaligned rows are refused here.
"""

import torch
from torch import Tensor

from kernels.torch.common import missing_cuda, takes_causal_flag
from verify.variant import AttentionArgs, Contract, Numerics, Support, Variant, Workspace

SUPPORT = Support(
    dtypes=("float16", "bfloat16"),
    head_dims=range(8, 257, 8),
    masks=("full", "causal.square"),
    grouped_heads=True,
    scales="positive",
    layouts="aligned",
    devices=("cuda",),
    capability=(8, 0),
)


def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
    """O and natural LSE; raises `Unsupported`."""
    SUPPORT.check(args, out)
    assert lse is not None
    found_out, found_lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        args.q, args.k, args.v, 0.0, takes_causal_flag(args), False, scale=args.softmax_scale
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
    numerics=Numerics(block_n=32, scale_roundings=3),
    contract=Contract(empty_row_lse=float("inf"), batch_invariant=False),
    allocates_outputs=True,
    available=available,
)
