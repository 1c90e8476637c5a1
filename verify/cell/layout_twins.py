"""Twins: a plain function under each layout, which a cell holds beside the one on trial, for a
finding to ask."""

from __future__ import annotations

# By the name that a file says in LAYOUT.
LAYOUTS = {
    "bhsd": "(batch, heads, seqlen, head_dim)",
    "bshd": "(batch, seqlen, heads, head_dim)",
}


def twin(name: str, layout: str) -> str:
    """What a plain function is called in a cell that takes and returns its tensors in that
    layout."""
    return f"{name}:{layout}"
