"""Pictures of masks, as text."""

from __future__ import annotations

from references.masks.base import Mask, gallery


def picture(mask: Mask, seqlen_q: int, seqlen_kv: int) -> str:
    """The mask of batch 0 and head 0: one line per query, one character per pair."""
    rows = mask.dense(1, 1, seqlen_q, seqlen_kv)[0, 0].tolist()
    return "\n".join("".join("█" if seen else "·" for seen in row) for row in rows)


def main() -> None:
    """Print the gallery: each mask's name above its picture, 12 queries by 24 keys."""
    for mask in gallery():
        print(f"{mask.name}\n{picture(mask, 12, 24)}\n")
