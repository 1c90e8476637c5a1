"""Factors: every level has a problem, and a pair of levels meets in a case or is named."""

from __future__ import annotations

import pytest

from verify.problem import Problem
from verify.problem.factors import levels, met, pair_name, pairs
from verify.variant import Config

CONFIG = Config(block_m=64, block_n=32)

LEVELS = (
    ("sq=5,skv=9,d=64", "mask", "full"),
    ("sq=5,skv=9,d=64,mask=causal.tl", "mask", "causal.tl"),
    ("sq=5,skv=9,d=64,mask=window.4.4", "mask", "window"),
    ("sq=5,skv=9,d=64,mask=window.3.4", "mask", "window, narrow"),
    ("sq=5,skv=9,d=64,mask=window.inf.4", "mask", "window, left side open"),
    ("sq=5,skv=9,d=64,mask=window.4.inf", "mask", "window, right side open"),
    ("sq=5,skv=9,d=64,mask=window.inf.inf", "mask", "window, open"),
    ("sq=9,skv=9,d=64,mask=documents.4_5", "mask", "documents"),
    ("sq=9,skv=9,d=64,mask=documents.1_2_3_3", "mask", "documents, many"),
    ("sq=9,skv=9,d=64,mask=documents.4_0_5", "mask", "documents, an empty one"),
    ("b=2,sq=5,skv=9,d=64,mask=lengths.5_5.9_0", "mask", "lengths, one of 0"),
    ("sq=5,skv=9,d=64,mask=causal+window.2.2", "mask", "intersection"),
    ("sq=1,skv=9,d=64", "rows", "1"),
    ("sq=63,skv=9,d=64", "rows", "below a tile"),
    ("sq=64,skv=9,d=64", "rows", "one tile"),
    ("sq=65,skv=9,d=64", "rows", "one tile and 1"),
    ("sq=127,skv=9,d=64", "rows", "tiles less 1"),
    ("sq=128,skv=9,d=64", "rows", "tiles"),
    ("sq=129,skv=9,d=64", "rows", "tiles and 1"),
    ("sq=150,skv=9,d=64", "rows", "tiles and a part"),
    ("sq=5,skv=33,d=64", "keys", "one tile and 1"),
    ("sq=5,skv=9,d=64", "lengths", "less"),
    ("sq=9,skv=9,d=64", "lengths", "equal"),
    ("sq=9,skv=5,d=64", "lengths", "more"),
    ("sq=5,skv=9,d=64", "head_dim", "64"),
    ("sq=5,skv=9,d=63", "head_dim", "below 64"),
    ("sq=5,skv=9,d=300", "head_dim", "above 256"),
    ("sq=5,skv=9,d=64,dv=32", "head_dim_v", "less"),
    ("sq=5,skv=9,d=64", "heads", "one"),
    ("hq=2,hkv=2,sq=5,skv=9,d=64", "heads", "several"),
    ("hq=2,hkv=1,sq=5,skv=9,d=64", "heads", "one key head"),
    ("hq=4,hkv=2,sq=5,skv=9,d=64", "heads", "grouped"),
    ("b=2,sq=5,skv=9,d=64", "batch", "2"),
    ("b=4,sq=5,skv=9,d=64", "batch", "3 or more"),
    ("sq=5,skv=9,d=64,scale=0.0", "scale", "0"),
    ("sq=5,skv=9,d=64,scale=-1.0", "scale", "negative"),
    ("sq=5,skv=9,d=64,scale=1.0", "scale", "other"),
    ("sq=5,skv=9,d=64", "scale", "default"),
    ("sq=5,skv=9,d=64,softcap=2.0", "score_mod", "softcap"),
    ("sq=5,skv=9,d=64", "storage", "contiguous"),
    ("b=2,sq=5,skv=9,d=64,lk=bhsd.xb", "storage", "expanded"),
    ("sq=5,skv=9,d=64,lk=bhsd.o1", "storage", "misaligned"),
    ("b=2,hq=2,hkv=2,sq=5,skv=9,d=64,lk=bshd", "storage", "strided"),
)


def problem(name: str) -> Problem:
    return Problem.parse(f"{name},dtype=float16")


@pytest.mark.parametrize(("name", "factor", "level"), LEVELS)
def test_a_problem_is_at_that_level(name: str, factor: str, level: str) -> None:
    assert levels(problem(name), CONFIG)[factor] == level


def test_without_a_query_and_a_key_there_is_no_level() -> None:
    assert levels(problem("sq=0,skv=9,d=64"), CONFIG) == {}


def test_pairs_are_of_two_factors_each() -> None:
    found = levels(problem("sq=5,skv=9,d=64"), CONFIG)
    assert len(pairs(found)) == len(found) * (len(found) - 1) // 2
    assert (("batch", "1"), ("mask", "full")) in pairs(found)
    assert pair_name((("batch", "1"), ("mask", "full"))) == "batch 1 with mask full"
    two = met([(problem("sq=5,skv=9,d=64"), CONFIG), (problem("b=2,sq=5,skv=9,d=64"), CONFIG)])
    assert len(two) == len(pairs(found)) + len(found) - 1
