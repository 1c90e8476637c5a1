"""Inputs that the emulations, references and bounds of a question share stay as they are."""

from __future__ import annotations

import pytest
import torch

from tests.harness.drawn_inputs import drawn, drawn_dout
from verify.problem import Problem
from verify.problem.inputs import dout, tensors

TEXT = "hq=2,hkv=1,sq=5,skv=7,d=8,dtype=float32,seed={}"


def test_they_are_the_problems_own() -> None:
    problem = Problem.parse(TEXT.format(901))
    for name, made in tensors(problem).named.items():
        assert torch.equal(drawn(problem).named[name], made)
    assert torch.equal(drawn_dout(problem), dout(problem))


def test_who_writes_into_them_is_told_so() -> None:
    problem = Problem.parse(TEXT.format(902))
    drawn(problem).q.flatten(0, 1).float()[0].mul_(2)  # of float32 no copy
    drawn_dout(problem).add_(1)
    for read in (drawn, drawn_dout):
        with pytest.raises(RuntimeError, match="written into"):
            read(problem)
