"""Quantisations: which factors each has, and one with block scales from outside the tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from references.premises import EVERY_PREMISE, Premise
from references.quantisation import (
    KINDS,
    ByHead,
    ByTensor,
    Quantisation,
    Shapes,
    Unquantised,
    parse_quantisation,
    quantisation_words,
)
from tests.harness.fake_trials import DECLARED, SHAPE
from tests.harness.laid import contents, laid
from verify.cell.arena import Arena, plan
from verify.problem import Problem
from verify.problem.inputs import dequantised, stored_factors, tensors, unit_factors
from verify.problem.refusal import plainest
from verify.problem.sampling import draws
from verify.problem.strategies import LIMITS, problems
from verify.tolerance.forward import resolve
from verify.variant import Config, Numerics

torch.set_num_threads(1)

EIGHT = Problem(**SHAPE, dtype="float8_e4m3fn", seed=3)
STORED = {"none": None, "tensor": (1, 1), "head": (2, 2)}


@pytest.mark.parametrize("word", STORED)
def test_factors_lie_as_the_quantisation_says(word: str) -> None:
    problem = EIGHT.but(quantisation=parse_quantisation(word))
    assert Problem.parse(problem.name) == problem
    assert problem.descaling == word
    found = stored_factors(problem)
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    assert set(shapes.values()) == ({STORED[word]} if STORED[word] else set())
    assert {name: tensor.shape for name, tensor in unit_factors(problem).items()} == shapes
    where = plan(problem, lse=True, workspace={})
    if STORED[word]:
        assert where["descale_q"].shape == (2, 2)
        assert where["descale_v"].strides == ((0, 0) if word == "tensor" else (2, 1))


def test_what_each_breaks() -> None:
    assert quantisation_words()[:3] == ("none", "tensor", "head")
    assert EIGHT.features == ()
    for quantisation, label in ((ByTensor(), "descales by tensor"), (ByHead(), "descales by head")):
        (feature,) = EIGHT.but(quantisation=quantisation).features
        assert (feature.label, feature.breaks) == (label, {Premise.PLAIN_INPUTS})


def test_the_plainest_is_none_where_it_is_allowed() -> None:
    support = replace(DECLARED.support, descalings=("head", "none"))
    assert plainest(support) == {"quantisation": Unquantised()}
    assert plainest(replace(support, descalings=("tensor", "head"))) == {"quantisation": ByTensor()}


@pytest.mark.parametrize("word", ["head", "Blocks", "of.32"])
def test_a_bad_word_is_refused_when_the_class_is_made(word: str) -> None:
    with pytest.raises(TypeError, match=rf"^quantisation: Zebra.word '{word}' is taken or no word"):
        type("Zebra", (ByHead,), {"word": word})
    assert word == "head" or word not in KINDS
    with pytest.raises(TypeError, match=r"breaks lacks Premise\.PLAIN_INPUTS"):
        type("Zebra", (ByHead,), {"word": "zebra", "breaks": frozenset()})
    assert "zebra" not in KINDS


# From outside the tree.


@pytest.fixture
def blocks() -> Iterator[type[Quantisation]]:
    """One factor for 4 elements of a row, as MXFP8 has it for 32; V's stand along the keys."""

    @dataclass(frozen=True)
    class Blocks(Quantisation):
        word: ClassVar[str] = "blocks4"

        def factors(self, name: str, shapes: Shapes) -> tuple[int, ...]:
            batch, heads, rows, dim = shapes[name]
            if name == "v":
                return batch, heads, -(-rows // 4), dim
            return batch, heads, rows, -(-dim // 4)

        def spread(self, factors: Tensor, name: str, shapes: Shapes) -> Tensor:
            dim = 2 if name == "v" else 3
            return factors.repeat_interleave(4, dim).narrow(dim, 0, shapes[name][dim])

    try:
        yield Blocks
    finally:
        KINDS.pop("blocks4", None)


def test_block_scales_have_their_own_shape(blocks: type[Quantisation]) -> None:
    problem = EIGHT.but(head_dim=18, head_dim_v=18, quantisation=blocks())
    assert problem.name.endswith("descale=blocks4,seed=3")
    assert Problem.parse(problem.name) == problem
    (feature,) = problem.features
    assert (feature.label, feature.breaks) == ("descales by blocks4", EVERY_PREMISE)
    given = tensors(problem)
    shapes = {name: tuple(tensor.shape) for name, tensor in given.others.items()}
    assert shapes == {
        "descale_q": (2, 4, 6, 5),
        "descale_k": (2, 2, 9, 5),
        "descale_v": (2, 2, 3, 18),
    }
    arena, where = Arena(), plan(problem, lse=True, workspace={})
    runs = laid(arena, where, given.named)
    for name, tensor in given.others.items():
        assert torch.equal(contents(runs, name), tensor)
    arena.close()


def test_block_scales_multiply_their_blocks(blocks: type[Quantisation]) -> None:
    problem = EIGHT.but(head_dim=18, head_dim_v=18, quantisation=blocks())
    given = tensors(problem)
    q, k, v = dequantised(problem, given)
    factor = given.others["descale_k"].double()
    assert torch.equal(k[..., 17], given.k.double()[..., 17] * factor[..., 4])
    assert torch.equal(q[..., 3], given.q.double()[..., 3] * given.others["descale_q"][..., 0])
    assert torch.equal(v[:, :, 8], given.v.double()[:, :, 8] * given.others["descale_v"][:, :, 2])


def test_block_scales_are_a_word_and_drawn(blocks: type[Quantisation]) -> None:
    support = replace(DECLARED.support, dtypes=("float8_e4m3fn",), descalings=("none", "blocks4"))
    strategy = problems(
        replace(DECLARED, support=support), dtype="float8_e4m3fn", limits=LIMITS["interpreter"]
    )
    words = [problem.descaling for problem in draws(strategy, 30)]
    assert min(words.count("none"), words.count("blocks4")) >= 5
    assert DECLARED.support.refusal(EIGHT.but(dtype="float16", quantisation=blocks())) == (
        "descales",
        "blocks4 is none of none",
    )


def test_no_bound_is_derived_for_block_scales(blocks: type[Quantisation]) -> None:
    problem = EIGHT.but(quantisation=blocks())
    said = "^problem.quantisation: no bound is derived for descales by blocks4$"
    with pytest.raises(ValueError, match=said):
        resolve(Numerics(), Config(), problem, "sm_90")
