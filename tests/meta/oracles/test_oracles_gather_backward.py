"""Gathering backwards alone: dV is a sum of integers, dQ and dK are zero."""

from __future__ import annotations

from dataclasses import field as defaulted
from dataclasses import make_dataclass, replace

import pytest
import torch

from references.masks import Causal
from tests.harness.declared import flat_numerics, with_fields
from tests.harness.fake_trials import DECLARED, acquitted, convicted
from tests.harness.reference_kernel import Hand, faulty, tried_by
from tests.meta.oracles.test_oracles_integers import DTYPES, MASKS, problem
from verify.judging.selected_sums import selected_sums
from verify.oracles import bound, gather, of_group
from verify.problem import Problem
from verify.problem.known_answers import gather_targets
from verify.variant import Config, Declaration, GradientNumerics

torch.set_num_threads(1)


def scattered(dtype: str = "float16", **changes: object) -> Problem:
    return problem("gather_integers", dtype, **changes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gathered_row_has_no_gradient_but_dv(dtype: str) -> None:
    for mask in MASKS:
        trial = tried_by(Hand(), scattered(dtype, mask=mask), "backward")
        ruling = gather.judge_backward(trial)
        assert acquitted(ruling)
        assert ruling.measures["gather_backward_exact_rows"] == 1


def test_dv_is_the_sum_of_dout_bit_for_bit() -> None:
    case = scattered("bfloat16", mask=Causal())
    trial = tried_by(Hand(), case, "backward")
    targets, want = gather_targets(case), torch.zeros(case.shape_v)
    for b, h, i in (targets >= 0).nonzero().tolist():
        want[b, h // 2, targets[b, h, i]] += trial.dout[b, h, i].float()
    assert torch.equal(trial.first.outputs["dv"].float(), want)
    _, slack = selected_sums(trial, targets, targets >= 0)
    assert float(slack.max()) == 0


GATHER_FAULTS = {
    "delta of the next row": (faulty(delta=lambda x: x.roll(1, 2)), "dq is"),
    "delta of the other head": (faulty(delta=lambda x: x.roll(1, 1)), "dq is"),
    "delta off by 2^-9": (faulty(delta=lambda x: x * (1 + 2**-9)), "dq is"),
    "P off by 2^-9": (faulty(exp2=lambda x: torch.exp2(x) * (1 - 2**-9)), "dv is"),
    "V of the next key": (faulty(load=lambda name, x: x.roll(1, 2) if name == "v" else x), "dq is"),
}


@pytest.mark.parametrize("name", GATHER_FAULTS)
def test_a_gradient_where_there_is_none_is_convicted(name: str) -> None:
    hand, words = GATHER_FAULTS[name]
    trial = tried_by(hand, scattered(), "backward")
    # the forward is another kernel, and right
    trial.launches["saved"] = tried_by(Hand(), scattered()).first
    convicted(gather.judge_backward(trial), words)


def test_a_delta_a_little_off_is_within_the_bound_elsewhere() -> None:
    """Only known roundings show it there."""
    hand = GATHER_FAULTS["delta off by 2^-9"][0]
    trial = tried_by(
        hand, problem("normal", "bfloat16"), "backward", configs=(Config(block_m=16, block_n=32),)
    )
    trial.launches["saved"] = tried_by(Hand(), problem("normal", "bfloat16")).first
    ruling = bound.judge_backward(trial)
    assert max(ruling.measures[f"r_{name}"] for name in ("dq", "dk", "dv")) <= 1
    convicted(ruling, "is no rounding of what P and dS give")


def test_rows_and_keys_that_are_wrong_are_named() -> None:
    for name, place in (("dq", "dq[b=1, h=3, q=4, d=5]"), ("dk", "dk[b=1, h=1, k=4, d=5]")):
        trial = tried_by(Hand(), scattered(), "backward")
        trial.first.outputs[name][1, -1, 4, 5] = 2.0**-20
        finding = convicted(gather.judge_backward(trial), f"{name} is 9.5", "should be 0")
        assert (finding.where, finding.count) == (place, 1)
    trial = tried_by(Hand(), scattered(), "backward")
    trial.first.outputs["dv"][0, 1, 3] *= 0.0
    assert convicted(gather.judge_backward(trial), "dv is 0 at dv[b=0, h=1, k=3").count > 0


def test_a_forward_that_does_not_gather_exactly_is_not_held_against_the_backward() -> None:
    trial = tried_by(Hand(), scattered("float32"), "backward")
    saved = dict(trial.saved.outputs)
    saved["out"] = saved["out"].clone()
    saved["out"][0, 0, 3] *= 1 + 2**-22
    trial.launches["saved"] = replace(trial.saved, outputs=saved)
    ruling = gather.judge_backward(trial)
    assert acquitted(ruling)
    assert ruling.measures["gather_backward_exact_rows"] == 319 / 320


def as_declared(**changes: object) -> Declaration:
    return replace(
        DECLARED,
        gradients=with_fields(GradientNumerics(), **changes),
        entries=("forward", "backward"),
    )


def test_a_backward_that_may_honestly_miss_these_integers_is_not_asked() -> None:
    """A delta in 16 bits, as may be declared, is not dP; K that was rounded after the scale moves
    the winner's score."""
    for hand in (
        faulty(delta=lambda x: x.bfloat16().float()),
        faulty(load=lambda name, x: (x * 0.18).bfloat16().float() / 0.18 if name == "k" else x),
    ):
        case = scattered("bfloat16", head_dim=512)
        trial = tried_by(hand, case, "backward")
        trial.launches["saved"] = tried_by(Hand(), case).first
        assert not acquitted(gather.judge_backward(trial))
    (long,) = (oracle for oracle in of_group("long_gradients") if oracle.name == "gather_backward")
    for excludes in (gather.BACKWARD.excludes, long.excludes):
        assert excludes(DECLARED) == "declares no gradients"
        for known in (
            {},
            {"probability": "float32"},
            {"group": "cast"},
            {"exp": "expf"},
            {"atomics": ("dv",)},
            {"block_m": 64},
        ):
            assert excludes(as_declared(**known)) is None
        for path, value in (
            ("score_gradient.delta", "input"),
            ("products.prescale", "k"),
            ("sums.atomics_dtype", "input"),
        ):
            assert (
                excludes(as_declared(**{path.split(".")[1]: value}))
                == f"declares gradients.{path} = {value!r}, for which nothing is derived"
            )
        assert (
            excludes(as_declared(exp="exp2_poly3"))
            == "declares exp2_poly3, which is not known to vanish"
        )


def test_a_field_that_nobody_knows_is_a_reason() -> None:
    newer = make_dataclass(
        "Newer",
        [("novel", str, defaulted(default="no"))],
        bases=(GradientNumerics,),
        frozen=True,
        kw_only=True,
    )
    assert gather.excludes_backward(replace(DECLARED, gradients=newer())) is None
    told = gather.excludes_backward(replace(DECLARED, gradients=newer(novel="yes")))
    assert told == "declares gradients.novel = 'yes', for which nothing is derived"


def test_nothing_that_a_forward_declares_changes_what_its_backward_is_asked() -> None:
    odd = flat_numerics(
        accumulator="float16",
        row_sum_of="mma",
        maximum_lag=8.0,
        division="rcp.approx",
        split_keys=True,
        scores="input",
    )
    trial = tried_by(Hand(), scattered(), "backward", numerics=odd)
    assert gather.judge_backward(trial) == gather.judge_backward(
        tried_by(Hand(), scattered(), "backward")
    )
