"""Attention: the mask, the scale and the score mod of one problem."""

from __future__ import annotations

from dataclasses import dataclass

from references.masks import Mask
from references.score_mods import ScoreMod


@dataclass(frozen=True)
class Attention:
    """The mathematics of one problem.  softmax_scale may be zero or negative; score_mod None
    means none."""

    mask: Mask
    softmax_scale: float
    score_mod: ScoreMod | None = None
