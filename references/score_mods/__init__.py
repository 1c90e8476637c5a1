"""Score mods: functions that softmax takes of scaled scores.  One file per kind.

A `ScoreMod` is a frozen, hashable value.  Its name, `word=text`, parses back and is part of the
name of a problem.  Its function `f(s, b, h, q, k)` has FlexAttention's signature.  It also declares
what references and bounds need: the slope of f, its range, how far an error of s moves f(s), and
the roundings of a correct kernel.  The mask is applied after f.  An attention without a score mod
has None.

A new kind is one file in this folder: a subclass of `ScoreMod` (see references/score_mods/base.py).
This package imports all files of the folder, and Python registers each class when it creates it.
Declarations can then use its word, and problems are drawn with it.
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
