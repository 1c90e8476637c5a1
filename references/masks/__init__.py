"""Masks: which key a query can see.  One file per kind.

A `Mask` is a frozen, hashable value with a one-line name that parses back: `parse_mask(mask.name)`
equals `mask`.  It is defined by its predicate `mask.mod(seqlen_q, seqlen_kv)(b, h, q, k)`, which
has FlexAttention's signature.  In every mask except `Dense`, a row sees one interval of keys, which
`Mask.interval` gives; a test checks that the two forms are equal.

In a mask with a diagonal, `offset = seqlen_kv - seqlen_q` aligns it to the bottom right corner (the
last query sees the last key, as in FlashAttention >= 2.1) and `offset = 0` to the top left corner
(as in torch's `is_causal`).  Windows are inclusive on both sides.  Lengths, documents and prefixes
are counted from position 0.

A new kind is one file in this folder: a subclass of `Atom` (see references/masks/base.py).  This
package imports all files of the folder, and Python registers each class when it creates it.
Declarations can then use its words, problems are drawn with it, and oracles test it.

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
