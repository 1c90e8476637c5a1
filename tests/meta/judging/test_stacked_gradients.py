"""Gradients of many cases at once are those of each case alone, whatever the other cases are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from references.masks import Causal, Dense, Full, Lengths, Window, intersect
from references.quantisation import parse_quantisation
from references.score_mods import Softcap
from tests.harness.judge_devices import BACKWARDS, CONFIG
from tests.harness.stacks import neighbours
from verify.judging.gradient_truth import GradientQuestion
from verify.judging.stacked import Repeated
from verify.judging.stacked_gradients import AskedGradients, answer, excludes
from verify.judging.truth import compute_truth
from verify.problem import Problem
from verify.problem.inputs import dequantised, dout, tensors
from verify.tolerance import backward, forward
from verify.tolerance.backward import GradientTruth, OwnForward
from verify.tolerance.intervals import Interval
from verify.variant import GradientNumerics, Numerics

torch.set_num_threads(1)

BASE = Problem(
    heads_q=4, heads_kv=2, seqlen_q=37, seqlen_kv=70, head_dim=24, dtype="float16", mask=Causal()
)
# Values that overflow, underflow or are peaked stand beside ordinary ones.
VALUES = ("normal", "large_logits", "subnormals", "range_edges", "outliers", "normal", "sink")
SHAPES = (
    BASE,
    BASE.but(mask=Full(), seqlen_q=3, seqlen_kv=300, dtype="bfloat16"),
    BASE.but(mask=intersect(Causal(), Window(20, 5)), dtype="float32", softmax_scale=-4.0),
    BASE.but(mask=Full(), score_mod=Softcap(3.0)),
    BASE.but(batch=2, mask=intersect(Causal(), Lengths((9, 37), (20, 0)))),
    BASE.but(batch=2, mask=intersect(Causal(), Dense(40, 7))),
)


def question_of(p: Problem, declared: GradientNumerics, arch: str = "sm_90") -> GradientQuestion:
    """From what an exact forward saves, in the problem's dtype."""
    inputs = dequantised(p, tensors(p))
    truth = compute_truth(p, inputs, [forward.resolve(Numerics(), CONFIG, p, arch)])
    first = replace(backward.resolve(declared, CONFIG, p, arch), intervals=True)
    best = backward.resolve(backward.BEST, CONFIG, p, arch)
    start = truth.out.to(p.format_out.torch), truth.lse.float().double()
    return GradientQuestion(p, inputs, dout(p), start, (first, best))


def numbers(truth: GradientTruth) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of it, by its name."""
    for name in (f.name for f in fields(truth)):
        value = getattr(truth, name)
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, tuple):
            yield from ((f"{name} {n}", x) for n, x in enumerate(value))
        elif value is not None:
            for of, span in value.items():
                assert isinstance(span, Interval)
                yield f"middle of {of}", span.middle
                yield f"reach of {of}", span.reach


def differences(case: AskedGradients) -> Iterator[str]:
    """What a case's answer has that it has not alone, beyond fp64's roundings."""
    (found,) = case.answers
    both = dict(numbers(found.truth)), dict(numbers(case.question.computed()))
    assert both[0].keys() == both[1].keys()
    for name, mine in both[0].items():
        other = both[1][name]
        # A sum of numbers of both signs is only as exact as the largest of them.
        size = float(other[other.isfinite()].abs().amax()) if bool(other.isfinite().any()) else 0.0
        if not torch.allclose(mine, other, rtol=1e-11, atol=1e-13 * size, equal_nan=True):
            yield f"{name} of {case.problem.name}"


@pytest.mark.first_look(3)
@pytest.mark.parametrize("declared", BACKWARDS.values(), ids=BACKWARDS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_stack_gives_what_each_case_gets_alone(
    shape: Problem, declared: GradientNumerics
) -> None:
    cases = [AskedGradients(question_of(p, declared)) for p in neighbours(shape, VALUES)]
    assert answer(cases) >= 2
    answered = [case for case in cases if case.answers]
    assert [text for case in answered for text in differences(case)] == []
    spent = [case.clock.seconds["bound"] for case in answered]
    assert min(spent) > 0


def test_a_neighbour_near_an_overflow_is_in_another_stack() -> None:
    """It decides for a whole problem whether hidden pairs count, and what can be asked."""
    calm = [BASE.but(seed=n) for n in range(3)]
    questions = [question_of(p, GradientNumerics()) for p in calm]
    wild = [replace(q, dout=q.dout.float() * 1e37) for q in questions[:2]]
    kinds = [backward.kind_of(BASE, q.tensors, q.arithmetics) for q in (*questions, *wild)]
    assert len(set(kinds[:3])) == len(set(kinds[3:])) == 1
    assert kinds[0] != kinds[3]
    cases = [AskedGradients(q) for q in (*questions, *wild[:1])]
    assert answer(cases) == 3
    assert not cases[3].answers


def test_what_a_stack_cannot_hold_is_left_alone() -> None:
    question = question_of(BASE, GradientNumerics())
    own = OwnForward(torch.zeros(()), torch.zeros(()))
    assert excludes(question) is None
    assert "no declaration" in str(excludes(replace(question, unknown=own)))
    nothing = replace(question, problem=BASE.but(seqlen_kv=0))
    assert "no query has a key" in str(excludes(nothing))
    scaled = BASE.but(dtype="float8_e4m3fn", quantisation=parse_quantisation("tensor"))
    assert "quantisation" in str(excludes(replace(question, problem=scaled)))
    lonely = AskedGradients(question)
    other = AskedGradients(question_of(BASE.but(seqlen_q=36), GradientNumerics()))
    assert answer([lonely, other]) == 0


def test_the_atoms_of_a_stacked_mask_are_of_all_its_sequences() -> None:
    for mask in (Lengths((9, 37), (20, 0)), intersect(Causal(), Lengths((9, 37), (20, 0)))):
        repeated = Repeated(mask, 2)
        for atom, alone in zip(repeated.atoms, mask.atoms, strict=True):
            seen, once = atom.dense(6, 1, 37, 70), alone.dense(2, 1, 37, 70)
            assert torch.equal(seen, once.repeat(3, 1, 1, 1))
        whole, alone = (
            intersect(*each.atoms).row_bounds(n, 37, 70) for each, n in ((repeated, 6), (mask, 2))
        )
        for mine, other in zip(whole, alone, strict=True):
            assert torch.equal(mine, other.repeat(3, 1))
