"""FlexAttention as its users run it: `torch.compile(flex_attention)` on CUDA, which fills in torch's Triton template.

From torch's template (`_inductor/kernel/flex`) and as seen on an H100 with torch 2.11:
- QK^T in fp32 (tl.dot), times the scale, score_mod, mask, times log2 e; exp2 (ex2.approx); P un-normalised in V's dtype; the
  row sum of unrounded P; one division at the end.  Every scale is right, negative ones and zero included.
- 32 keys per rescale is the smallest tile among the defaults for 16-bit dtypes and these head dims; 64 and more on an H100.
- Keys outside every block of the mask are not read; within a block 0 * NaN spreads from a masked value.
- An empty row gives O = 0 and LSE = -inf.  A length of 0 raises (torch's own assertion), as does a head dim below 16; fp32 at
  head dim 512 asks for more shared memory than there is.

A build takes 3 s, in fp32 6 s, and torch builds anew whenever a guard fails, so calls are arranged to differ in as few of the
guarded things as possible, and the support ends where the next build would be needed:
- Head counts, which flex_attention marks static: key heads of all sequences are laid end to end and taken two at a time.
- Sizes of 1, which Dynamo guards on: two pairs of heads and two blocks of queries and of keys at least, of which the surplus
  repeats the last head, or is never visited; lengths from 2 on.  Sizes that happen to agree are not taken for the same one.
- Group sizes: groups are filled up to a multiple of 8 with repeated queries.
- Masks: one mask_mod for all, which reads each row's interval of keys from tensors; dense masks would need another.
- Scale and softcap: one score_mod that reads both from tensors; flex_attention's own scale would be baked in.
That leaves 2 dtypes x 2 head dims x (one query head per key head, or groups) x (seqlen_q < 128, which Inductor guards on though
it generates the same kernel, or not).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from kernels.torch.common import BIAS_MASKS, missing_cuda
from verify.variant import AttentionArgs, Contract, Numerics, Support, Variant, Workspace

SUPPORT = Support(
    dtypes=("float16", "bfloat16"),
    head_dims=(64, 128),
    masks=tuple(kind for kind in BIAS_MASKS if kind != "dense"),
    intersections=True,
    grouped_heads=True,
    min_seqlen=2,
    softcap=True,
    layouts="contiguous",
    devices=("cuda",),
    capability=(8, 0),
)
PAIR = 2  # key heads per call's "sequence"
GROUP = 8
BUILDS = 64  # beyond its own small limit Dynamo would give up
OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}  # else short queries may take the decoding template


@functools.cache
def _compiled() -> Callable[..., Any]:
    torch._dynamo.config.recompile_limit = BUILDS
    torch.fx.experimental._config.use_duck_shape = False
    return torch.compile(flex.flex_attention, dynamic=True, fullgraph=True)


def _interval(low: Tensor, high: Tensor) -> Callable[..., Tensor]:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k >= low[b, h, q]) & (k < high[b, h, q])

    return mask_mod


def _scaled_and_capped(scale: Tensor, cap: Tensor) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        scaled = score * scale
        return torch.where(cap > 0, cap * torch.tanh(scaled / cap), scaled)

    return score_mod


def _filled(tensor: Tensor, dim: int, size: int) -> Tensor:
    """That tensor with its last entry along `dim` repeated until there are `size`; itself if there are."""
    surplus = size - tensor.shape[dim]
    if surplus <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = surplus
    return torch.cat([tensor, tensor.narrow(dim, -1, 1).expand(shape)], dim)


def _block_mask(low: Tensor, high: Tensor, seqlen_kv: int) -> flex.BlockMask:
    """The mask of rows (pairs, heads, seqlen_q) that see keys [low, high)."""
    pairs, heads, seqlen_q = low.shape
    mod = _interval(low, high)
    made = flex.create_block_mask(mod, pairs, heads, seqlen_q, seqlen_kv, device=low.device)
    # (pairs, heads, query blocks) and (pairs, heads, query blocks, key blocks); the surplus counts no block.
    queries, keys = (max(2 - size, 0) for size in made.kv_indices.shape[-2:])
    parts = (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)
    padded = [F.pad(part, (0, queries) if part.dim() == 3 else (0, keys, 0, queries)) for part in parts]
    return flex.BlockMask.from_kv_blocks(
        *padded, BLOCK_SIZE=made.BLOCK_SIZE, mask_mod=mod, seq_lengths=(seqlen_q, seqlen_kv), compute_q_blocks=False
    )


def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
    """O and natural LSE by compiled flex_attention; raises `Unsupported`."""
    SUPPORT.check(args, out)
    assert lse is not None
    group, heads = args.heads_q // args.heads_kv, args.batch * args.heads_kv
    width = 1 if group == 1 else -(-group // GROUP) * GROUP
    count = max(-(-heads // PAIR), 2) * PAIR
    q = args.q.view(heads, group, args.seqlen_q, args.head_dim)
    q = _filled(_filled(q, 1, width), 0, count).view(-1, PAIR * width, args.seqlen_q, args.head_dim)
    k, v = (_filled(t.flatten(0, 1), 0, count).unflatten(0, (-1, PAIR)) for t in (args.k, args.v))
    rows = args.mask.row_bounds(args.batch, args.seqlen_q, args.seqlen_kv, q.device)
    bounds = (
        torch.from_dlpack(_filled(row.repeat_interleave(args.heads_kv * width, 0), 0, count * width).view(q.shape[:3]))
        for row in rows
    )
    found_out, aux = _compiled()(
        *map(torch.from_dlpack, (q, k, v)),
        score_mod=_scaled_and_capped(*(q.new_tensor(x, dtype=torch.float32) for x in (args.softmax_scale, args.softcap))),
        block_mask=_block_mask(*bounds, args.seqlen_kv),
        scale=1.0,
        enable_gqa=group > 1,
        kernel_options=OPTIONS,
        return_aux=flex.AuxRequest(lse=True),
    )
    for found, wanted in ((found_out, out), (aux.lse, lse)):
        rows_found = found.reshape(count, width, *wanted.shape[2:])[:heads, :group]
        wanted.copy_(rows_found.reshape(wanted.shape))


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
    numerics=Numerics(block_n=32, scale_roundings=3, softcap_tanh="tanhf"),
    contract=Contract(batch_invariant=False),
    allocates_outputs=True,
    available=available,
)
