"""What is computed: the mask, the scale and the softcap of an attention."""

from __future__ import annotations

from dataclasses import dataclass

from references.masks import Mask


@dataclass(frozen=True)
class Attention:
    """The mathematics of one problem.  softmax_scale may be zero or negative; softcap 0 means
    none."""

    mask: Mask
    softmax_scale: float
    softcap: float = 0.0
