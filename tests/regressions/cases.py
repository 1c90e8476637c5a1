"""Problems that several regressions ask."""

from __future__ import annotations

from references.masks import Causal
from verify.problem import Problem

SHAPE = {
    "batch": 2,
    "heads_q": 4,
    "heads_kv": 2,
    "seqlen_q": 24,
    "seqlen_kv": 70,
    "head_dim": 32,
    "dtype": "float16",
}
SQUARE = SHAPE | {"seqlen_kv": 24}
COUNTED = Problem(**(SHAPE | {"seqlen_q": 8}), seed=3, distribution="counting", mask=Causal())
