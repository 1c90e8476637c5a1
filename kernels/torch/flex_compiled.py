"""FlexAttention as its users run it: `torch.compile(flex_attention)` on CUDA, which fills in torch's Triton templates.

From torch's templates (`_inductor/kernel/flex`); what an H100 has to confirm is marked (?):
- One build per dtype, head dims, head counts and mask form, none per length (dynamic=True; but sizes of 1 are apart, and
  seqlen_q < 128 may take the decoding template).  So nothing of the mask is baked in: every mask but a dense one reads each
  row's interval of keys from a tensor, dense ones read a table, and softcap is a tensor too.  A scale is baked in by torch:
  the default one is passed as users pass it, others multiply the scores in the score_mod, so that they share one build.
- QK^T in fp32 (tl.dot, IEEE for fp32 inputs unless TF32 was allowed), times the scale, score_mod, mask, times log2 e; exp2
  (ex2.approx); P un-normalised in V's dtype; the row sum of unrounded P; one division at the end.
- 16 keys per rescale is the smallest tile among the defaults (fp32, large head dims); 32 to 128 on an H100.
- Keys outside every block of the mask are not read; within a block 0 * NaN spreads from a masked value.
- An empty row gives O = 0 and LSE = -inf.
- Head dims: any from 16 on, each one a build; five stand for them, 80 for those that are padded to a power of two.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from kernels.torch.common import BIAS_MASKS, has_part, missing_cuda
from references.masks import Dense, Full
from verify.variant import AttentionArgs, Contract, Numerics, Support, Variant, Workspace

SUPPORT = Support(
    dtypes=("float32", "float16", "bfloat16"),
    head_dims=(16, 64, 80, 128, 256),
    masks=BIAS_MASKS,
    intersections=True,
    grouped_heads=True,
    separate_head_dim_v=True,
    softcap=True,
    devices=("cuda",),
    capability=(8, 0),
)
# Builds that one process may hold; beyond its own small limit Dynamo would give up.
BUILDS = 4096


@functools.cache
def _compiled() -> Callable[..., Any]:
    torch._dynamo.config.recompile_limit = BUILDS
    torch._dynamo.config.accumulated_recompile_limit = BUILDS
    return torch.compile(flex.flex_attention, dynamic=True, fullgraph=True)


def _interval(low: Tensor, high: Tensor) -> Callable[..., Tensor]:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k >= low[b, q]) & (k < high[b, q])

    return mask_mod


def _table(seen: Tensor) -> Callable[..., Tensor]:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return seen[b, h, q, k]

    return mask_mod


def _block_mask(args: AttentionArgs) -> flex.BlockMask | None:
    if isinstance(args.mask, Full):
        return None
    lengths, device = (args.seqlen_q, args.seqlen_kv), args.q.device
    if has_part(args, Dense):
        table = args.mask.dense(args.batch, args.heads_q, *lengths, device).contiguous()
        return flex.create_block_mask(_table(table), args.batch, args.heads_q, *lengths, device=device)
    mod = _interval(*args.mask.row_bounds(args.batch, *lengths, device))
    return flex.create_block_mask(mod, args.batch, None, *lengths, device=device)


def _scaled(scale: Tensor) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score * scale

    return score_mod


def _capped(cap: Tensor) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod


def _scaled_and_capped(scale: Tensor, cap: Tensor) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score * scale / cap)

    return score_mod


def _score_mod(args: AttentionArgs, default_scale: bool) -> Callable[..., Tensor] | None:
    scale, cap = (args.q.new_tensor(value, dtype=torch.float32) for value in (args.softmax_scale, args.softcap))
    if default_scale:
        return _capped(cap) if args.softcap else None
    return _scaled_and_capped(scale, cap) if args.softcap else _scaled(scale)


def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
    """O and natural LSE by compiled flex_attention; raises `Unsupported`."""
    SUPPORT.check(args, out)
    assert lse is not None
    default = math.isclose(args.softmax_scale, args.head_dim**-0.5)
    found_out, aux = _compiled()(
        args.q,
        args.k,
        args.v,
        score_mod=_score_mod(args, default),
        block_mask=_block_mask(args),
        scale=None if default else 1.0,
        enable_gqa=args.heads_q != args.heads_kv,
        return_aux=flex.AuxRequest(lse=True),
    )
    out.copy_(found_out)
    lse.copy_(aux.lse)


def available() -> str | None:
    """Why it cannot run here, or None."""
    if not hasattr(flex, "AuxRequest"):
        return f"torch {torch.__version__}: flex_attention has no AuxRequest"
    return missing_cuda()


VARIANT = Variant(
    name="torch-flex-compiled",
    family="torch",
    forward=forward,
    support=SUPPORT,
    numerics=Numerics(block_n=16, scale_roundings=3, softcap_tanh="tanhf"),
    contract=Contract(batch_invariant=False),
    allocates_outputs=True,
    available=available,
)
