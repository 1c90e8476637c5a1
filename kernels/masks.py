"""Masks as kernels take them: nothing, a band between two diagonals, or a table of intervals."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from references.masks import Causal, Full, Window
from verify.variant import AttentionArgs


@dataclass(frozen=True)
class MaskBuild:
    """A mask as the kernel takes it: its kind, and for "causal" and "window" the keys that row r
    sees: r + diagonal_low <= key <= r + diagonal_high.

    kind: "full", "causal", "window", or "interval" for a table.
    """

    kind: str
    diagonal_low: int = 0
    diagonal_high: int = 0


def mask_build(args: AttentionArgs) -> MaskBuild:
    """Fold causal and window parts into one band; anything else is read from a table of
    intervals."""
    lows: list[int] = []
    highs: list[int] = []
    for atom in args.mask.atoms:
        if isinstance(atom, Causal | Window):
            offset = args.seqlen_kv - args.seqlen_q if atom.alignment == "br" else 0
            left, right = (None, 0) if isinstance(atom, Causal) else (atom.left, atom.right)
            lows += [] if left is None else [offset - left]
            highs += [] if right is None else [offset + right]
        elif not isinstance(atom, Full):
            return MaskBuild("interval")
    kind = "window" if lows else "causal" if highs else "full"
    # Clamped to where a diagonal has left the score matrix: a window may be wider than 32 bits.
    nowhere_below, nowhere_above = -args.seqlen_q - 1, args.seqlen_kv
    low = max(nowhere_below, min(nowhere_above, max(lows, default=nowhere_below)))
    high = max(nowhere_below, min(nowhere_above, min(highs, default=nowhere_above)))
    return MaskBuild(kind, low, high)


def mask_tables(args: AttentionArgs, mask: MaskBuild) -> tuple[Tensor | None, Tensor | None]:
    """The visible keys [low, high) of every row, two contiguous int32 (batch, seqlen_q); None but
    for kind "interval"."""
    if mask.kind != "interval":
        return None, None
    low, high = args.mask.row_bounds(args.batch, args.seqlen_q, args.seqlen_kv, args.q.device)
    return low.contiguous(), high.contiguous()
