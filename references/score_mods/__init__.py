"""Score mods: what softmax takes in place of a scaled score.  One file per kind.

A `ScoreMod` is a frozen, hashable value whose name, `word=text`, is its place in the name of a
problem too, and parses back.  It is defined by its function `f(s, b, h, q, k)`, which has
FlexAttention's signature, and says of f what references and bounds need: its slope, how far it
reaches, how far an error of s moves it, and what an honest kernel rounds on the way.  The mask
follows f.  An attention without a score mod has None.

A new kind is one file in this folder: a subclass of `ScoreMod` (see references/score_mods/base.py).
The files are imported by themselves, and a class that is made is registered; the words that
declarations use and the problems that are drawn follow.
"""

import importlib
import pkgutil

from references.score_mods.base import (
    Extent,
    Rounding,
    ScoreFunction,
    ScoreMod,
    ScoreModNameError,
    mod_kind_of,
    mod_words,
    parse_score_mod,
)
from references.score_mods.softcap import Softcap, cap_of


def import_kinds() -> None:
    """Import every file of this folder, which registers the kinds that it defines."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


import_kinds()

__all__ = [
    "Extent",
    "Rounding",
    "ScoreFunction",
    "ScoreMod",
    "ScoreModNameError",
    "Softcap",
    "cap_of",
    "mod_kind_of",
    "mod_words",
    "parse_score_mod",
]
