"""cuDNN's fused attention through torch, `aten::_scaled_dot_product_cudnn_attention`.

cuDNN is closed: what is declared is what its manual and torch's wrapper say, pessimistic where they are silent, and what an
H100 has to confirm is marked (?):
- fp16 and bf16; head dims are multiples of 8 up to 128 (256 on sm_90 and later, with recent releases (?)).
- The graph is scores, scale, mask, softmax, PV, each in fp32 but for P, which enters PV in the input's dtype.
- 64 keys per rescale or more (?).  A graph is built and cached per shape, its engine chosen by heuristics: no batch invariance.
- Lengths of 0 are refused by the front end, and 1 by some releases (?).  Negative and zero scales (?): default scale only.
- The LSE is natural, shaped (batch, heads_q, seqlen_q, 1).  No masks but the square causal one, so no empty rows.
"""

import torch
from torch import Tensor

from kernels.torch.common import missing_cuda, takes_causal_flag
from verify.variant import AttentionArgs, Contract, Numerics, Support, Variant, Workspace

SUPPORT = Support(
    dtypes=("float16", "bfloat16"),
    head_dims=range(8, 129, 8),
    masks=("full", "causal.square"),
    grouped_heads=True,
    min_seqlen=2,
    scales="positive",
    layouts="aligned",
    devices=("cuda",),
    capability=(8, 0),
)


def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
    """O and natural LSE; raises `Unsupported`."""
    SUPPORT.check(args, out)
    assert lse is not None
    found_out, found_lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        args.q, args.k, args.v, None, True, 0.0, takes_causal_flag(args), False, scale=args.softmax_scale
    )
    out.copy_(found_out)
    lse.copy_(found_lse.view(lse.shape))


def available() -> str | None:
    """Why it cannot run here, or None."""
    if torch.cuda.is_available() and not torch._C._has_cudnn:
        return f"torch {torch.__version__} was built without cuDNN"
    return missing_cuda("_scaled_dot_product_cudnn_attention")


VARIANT = Variant(
    name="torch-cudnn",
    family="torch",
    forward=forward,
    support=SUPPORT,
    numerics=Numerics(block_n=64, scale_roundings=3),
    contract=Contract(batch_invariant=False),
    allocates_outputs=True,
    available=available,
)
