"""What the variants around torch's own kernels share: masks in the forms that ATen takes, and why
an operator cannot run."""

import math

import torch
from torch import Tensor

from references.masks import Causal, Full, Mask
from verify.variant import MASK_KINDS, AttentionArgs, Unsupported

# Every mask kind that a bias of zeros and -inf can express; "causal.square" is part of "causal" and
# "causal.tl".
BIAS_MASKS = tuple(kind for kind in MASK_KINDS if kind != "causal.square")
GRID = 65535  # CUDA's limit for the grid's second and third dimension


def missing_operator(name: str) -> str | None:
    """Why `torch.ops.aten.<name>` cannot be called, or None."""
    return (
        None if hasattr(torch.ops.aten, name) else f"torch {torch.__version__} has no aten::{name}"
    )


def missing_cuda(operator: str | None = None) -> str | None:
    """Why a CUDA kernel (of that ATen name) cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    return missing_operator(operator) if operator is not None else None


def takes_causal_flag(args: AttentionArgs, alignment: str = "tl") -> bool:
    """Whether an `is_causal` aligned to that corner says exactly this mask; ATen's is top left, but
    for flash on CUDA."""
    return isinstance(args.mask, Causal) and (
        args.mask.alignment == alignment or args.seqlen_q == args.seqlen_kv
    )


def check_grid(args: AttentionArgs, *names: str) -> None:
    """Raise `Unsupported` where one of these ("batch", "heads_q") does not fit into a CUDA grid.

    A support has no limit of that kind, and no problem that the suite draws comes near this one.
    """
    for name in names:
        if getattr(args, name) > GRID:
            raise Unsupported(name, f"{getattr(args, name)} is more than {GRID}")


def has_part(args: AttentionArgs, part: type[Mask]) -> bool:
    """Whether the mask is, or intersects with, one of that class."""
    return any(isinstance(atom, part) for atom in args.mask.atoms)


def flag_or_bias(
    args: AttentionArgs, *, flag: bool = True, pitch_multiple: int = 1
) -> tuple[bool, Tensor | None]:
    """The mask as ATen's (is_causal, attn_mask), with the top left corner's alignment; without
    `flag` never is_causal."""
    if isinstance(args.mask, Full):
        return False, None
    if flag and takes_causal_flag(args):
        return True, None
    return False, additive_bias(args, pitch_multiple)


def additive_bias(args: AttentionArgs, pitch_multiple: int = 1) -> Tensor:
    """The mask as torch's front end hands it to its kernels: 0 where visible, -inf elsewhere.

    (batch, heads_q, seqlen_q, seqlen_kv) in q's dtype; the row pitch is a multiple of
    `pitch_multiple` elements.
    """
    shape = args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv
    pitch = -(-args.seqlen_kv // pitch_multiple) * pitch_multiple
    bias = args.q.new_zeros((*shape[:3], pitch))[..., : args.seqlen_kv]
    return bias.masked_fill_(~args.mask.dense(*shape, device=args.q.device), -math.inf)
