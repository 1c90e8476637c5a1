"""FlexAttention as its users run it: `torch.compile(flex_attention)` on CUDA, which fills in
torch's Triton template.

From torch's template (`_inductor/kernel/flex`) and as seen on an H100 with torch 2.11:
- QK^T in fp32 (tl.dot), times the scale, score_mod, mask, times log2 e; exp2 (ex2.approx); P
  un-normalised in V's dtype; the row sum of unrounded P; one division at the end.  Every scale is
  right, negative ones and zero included.
- 64 keys per rescale is the smallest tile among the defaults for 16-bit dtypes and head dims 64 and
  128; 128 on an H100 at 64.
- Keys outside every block of the mask are not read; within a block 0 * NaN spreads from a masked
  value, but not from a key.
- An empty row gives O = 0 and LSE = -inf.  A length of 0 and a head dim below 16 are refused by
  torch; fp16 at head dim 512 asks for more shared memory than there is.

A build takes 3 s, in fp32 6 s, and torch builds anew whenever a guard fails.  So calls differ in as
few of the guarded things as possible, and the support ends where yet another build would begin:
- Head counts, which flex_attention marks static: the key heads of all sequences are laid end to end
  and taken two at a time.
- Group sizes: groups are filled up to a multiple of 8, with repeated queries.
- Sizes of 1: there are at least two pairs of heads, two blocks of queries and two of keys; surplus
  heads repeat the last one, surplus blocks are visited by no row.  Lengths begin at 2.
- Sizes that happen to agree: Dynamo is told not to take them for the same one ("duck shapes").
- Bases and offsets of views: tensors go through DLPack, which knows neither and copies nothing.
- Masks: one mask_mod reads each row's interval of keys from tensors; dense masks would need
  another.
- Scale and softcap: one score_mod reads both from tensors; flex_attention's own scale is baked in,
  and always 1.
What is left: 2 dtypes x 2 head dims x (one query head per key head, or groups) = 8 graphs; Inductor
builds each twice, because it guards on seqlen_q < 128, and generates the same kernel both times.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.fx.experimental._config as shape_config
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import pad
from torch.utils.dlpack import from_dlpack

from kernels.torch.common import BIAS_MASKS, GRID, missing_cuda
from verify.variant import (
    AttentionArgs,
    Contract,
    Numerics,
    Softmax,
    Support,
    Unsupported,
    Variant,
    Workspace,
)

SUPPORT = Support(
    dtypes=("float16", "bfloat16"),
    head_dims=(64, 128),
    masks=tuple(kind for kind in BIAS_MASKS if kind != "dense"),
    intersections=True,
    grouped_heads=True,
    min_seqlen=2,
    score_mods=("softcap",),
    layouts="contiguous",
    devices=("cuda",),
    capability=(8, 0),
)
PAIR = 2  # key heads in what the kernel takes for a sequence
GROUP = 8
BUILDS = 64  # beyond its own limit of 8 Dynamo would give up
OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}  # else short queries may take the decoding template


@functools.cache
def _compiled() -> Callable[..., Any]:
    torch._dynamo.config.recompile_limit = BUILDS
    shape_config.use_duck_shape = False
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
    """That tensor with its last entry along `dim` repeated until there are `size`; itself if there
    are."""
    surplus = size - tensor.shape[dim]
    if surplus <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = surplus
    return torch.cat([tensor, tensor.narrow(dim, -1, 1).expand(shape)], dim)


def _paired(tensor: Tensor, width: int, count: int) -> Tensor:
    """(key heads, group, ...) as (pairs, 2 * width, ...): the group filled up to `width`, the key
    heads to `count`."""
    filled = _filled(_filled(tensor, 1, width), 0, count)
    return from_dlpack(filled.reshape(count // PAIR, PAIR * width, *tensor.shape[2:]))


def _block_mask(low: Tensor, high: Tensor, seqlen_kv: int) -> flex.BlockMask:
    """The mask of rows (pairs, heads, seqlen_q) that see keys [low, high)."""
    pairs, heads, seqlen_q = low.shape
    mod = _interval(low, high)
    made = flex.create_block_mask(mod, pairs, heads, seqlen_q, seqlen_kv, device=low.device)
    # (pairs, heads, query blocks) and (pairs, heads, query blocks, key blocks); the surplus counts
    # no block.
    queries, keys = (max(2 - size, 0) for size in made.kv_indices.shape[-2:])
    parts = (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)
    counts, indices, full_counts, full_indices = (
        pad(part, (0, queries) if part.dim() == 3 else (0, keys, 0, queries))
        for part in parts
        if part is not None
    )
    return flex.BlockMask.from_kv_blocks(
        counts,
        indices,
        full_counts,
        full_indices,
        BLOCK_SIZE=made.BLOCK_SIZE,
        mask_mod=mod,
        seq_lengths=(seqlen_q, seqlen_kv),
        compute_q_blocks=False,
    )


def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
    """O and natural LSE by compiled flex_attention; raises `Unsupported`."""
    SUPPORT.check(args, out)
    with torch.cuda.device_of(args.q):  # DLPack hands out tensors of the current device alone
        _forward(args, out, lse)


def _forward(args: AttentionArgs, out: Tensor, lse: Tensor | None) -> None:
    assert lse is not None
    group, heads = args.heads_q // args.heads_kv, args.batch * args.heads_kv
    if heads > GRID:
        raise Unsupported("batch", f"{heads} key heads in all are more than {GRID}")
    width = 1 if group == 1 else -(-group // GROUP) * GROUP
    count = max(-(-heads // PAIR), 2) * PAIR
    q = _paired(args.q.view(heads, group, args.seqlen_q, -1), width, count)
    k, v = (_paired(t.view(heads, 1, args.seqlen_kv, -1), 1, count) for t in (args.k, args.v))
    low, high = (
        _paired(row[:, None, None].expand(-1, args.heads_kv, width, -1).flatten(0, 1), width, count)
        for row in args.mask.row_bounds(args.batch, args.seqlen_q, args.seqlen_kv, q.device)
    )
    found_out, aux = _compiled()(
        q,
        k,
        v,
        score_mod=_scaled_and_capped(
            *(q.new_tensor(x, dtype=torch.float32) for x in (args.softmax_scale, args.softcap))
        ),
        block_mask=_block_mask(low, high, args.seqlen_kv),
        scale=1.0,
        enable_gqa=group > 1,
        kernel_options=OPTIONS,
        return_aux=flex.AuxRequest(lse=True),
    )
    for found, wanted in ((found_out, out), (aux.lse, lse)):
        wanted.copy_(
            found.reshape(count, width, *wanted.shape[2:])[:heads, :group].reshape(wanted.shape)
        )


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
    numerics=Numerics(softmax=Softmax(block_n=64, scale_roundings=3, softcap_tanh="tanhf")),
    contract=Contract(batch_invariant=False),
    allocates_outputs=True,
    available=available,
)

WITNESS = (
    {
        "case": (
            "torch-flex-compiled:default:accuracy:hq=3,sq=390,skv=390,d=64,dtype=float16,"
            "mask=documents.2_5_127_16_129_111,scale=1.0,dist=one_hot_v,seed=4294967295"
        ),
        "tensor": "out",
        "r": 0.986,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
