"""Masks: which key a query may see.  One file per kind.

A `Mask` is a frozen, hashable value with a one-line name that parses back
(`parse_mask(mask.name) == mask`).  It is defined by its predicate
`mask.mod(seqlen_q, seqlen_kv)(b, h, q, k)`, which has FlexAttention's signature.  Every mask but
`Dense` sees one interval of keys per row, and says which (`Mask.interval`); a test holds the two
forms equal.

Where a mask speaks of a diagonal, `offset = seqlen_kv - seqlen_q` aligns it to the bottom right
corner (the last query sees the last key, as FlashAttention >= 2.1 has it) and `offset = 0` to the
top left corner (as torch's `is_causal` has it).  Windows are inclusive on both sides.  Lengths,
documents and prefixes are counted from position 0.

A new kind is one file in this folder: a subclass of `Atom` (see references/masks/base.py).  The
files are imported by themselves, and a class that is made is registered; the words that
declarations use, the problems that are drawn, and what the oracles ask, follow.

Run `python -m references.masks` to see them all.
"""

import importlib
import pkgutil

from references.masks.base import (
    Alignment,
    Atom,
    Choose,
    Intersection,
    Mask,
    MaskMod,
    MaskNameError,
    View,
    drawn_words,
    gallery,
    intersect,
    kind_of,
    kinds,
    mask_words,
)
from references.masks.causal import Causal
from references.masks.dense import Dense
from references.masks.documents import Documents
from references.masks.full import Full
from references.masks.lengths import Lengths
from references.masks.parsing import parse_mask
from references.masks.pictures import main, picture
from references.masks.prefix import Prefix
from references.masks.window import Window


def import_kinds() -> None:
    """Import every file of this folder, which registers the kinds that it defines."""
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{__name__}.{module.name}")


import_kinds()

GALLERY: tuple[Mask, ...] = gallery()
"""Examples of the kinds in this folder."""

__all__ = [
    "GALLERY",
    "Alignment",
    "Atom",
    "Causal",
    "Choose",
    "Dense",
    "Documents",
    "Full",
    "Intersection",
    "Lengths",
    "Mask",
    "MaskMod",
    "MaskNameError",
    "Prefix",
    "View",
    "Window",
    "drawn_words",
    "gallery",
    "intersect",
    "kind_of",
    "kinds",
    "main",
    "mask_words",
    "parse_mask",
    "picture",
]
