"""torch's memory-efficient attention on CUDA (CUTLASS, from xFormers), `aten::_scaled_dot_product_efficient_attention`.

From its source as torch carries it; what an H100 has to confirm is marked (?):
- fp16, bf16 and fp32.  fp32 products are three tf32 products each (CUTLASS OpMultiplyAddFastF32), far better than the plain
  tf32 that is declared here.  Head dims are multiples of 8; there is no largest one; V's may differ; no grouped heads.
- Scores accumulate in fp32.  With a bias they are scaled, the bias (in the input's dtype) is added and the maximum taken;
  without one they are scaled by float(scale * log2 e) inside the softmax.  Exponential ex2.approx, P un-normalised in the
  input's dtype for PV, row sum unrounded, 64 or 128 keys per rescale.
- `is_causal` writes -inf before the softmax scales: zero and negative scales are wrong there (?).  So the "-causal" variant
  takes the default scale only, and the other one hands every mask over as a bias.
- The bias needs a pitch of 16 elements, as the front end makes it.
- The LSE's seqlen is padded to a multiple of 32.  An empty row gives O = 0 and LSE = -inf (?).
- Rows whose pitch or start is no multiple of 16 bytes get a slower kernel (?): declared contiguous until that is seen.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.torch.common import BIAS_MASKS, additive_bias, missing_cuda, takes_causal_flag
from references.masks import Full
from verify.variant import AttentionArgs, Contract, Numerics, Support, Variant, Workspace

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
FLAG_SUPPORT = replace(BIAS_SUPPORT, masks=("full", "causal.tl", "causal.square"), intersections=False, scales="positive")
BIAS_PITCH = 16


def _variant(name: str, support: Support) -> Variant:
    def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
        """O and natural LSE; raises `Unsupported`."""
        support.check(args, out)
        assert lse is not None
        causal = not support.intersections and takes_causal_flag(args)
        bias = None if causal or isinstance(args.mask, Full) else additive_bias(args, BIAS_PITCH)
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
        numerics=Numerics(float32_products="tf32", block_n=64, scale_roundings=3),
        contract=Contract(batch_invariant=False),
        allocates_outputs=True,
        available=lambda: missing_cuda("_scaled_dot_product_efficient_attention"),
    )


VARIANTS = [_variant("torch-efficient", BIAS_SUPPORT), _variant("torch-efficient-causal", FLAG_SUPPORT)]
