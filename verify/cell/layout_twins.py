"""Twins: a plain function in each other tensor layout; a cell holds all of them, so that a finding
can name the right layout."""

from __future__ import annotations

# The value of LAYOUT in a file -> the order of dimensions.
LAYOUTS = {
    "bhsd": "(batch, heads, seqlen, head_dim)",
    "bshd": "(batch, seqlen, heads, head_dim)",
}


def twin(name: str, layout: str) -> str:
    """The variant name of a plain function that takes and returns tensors in that layout."""
    return f"{name}:{layout}"
