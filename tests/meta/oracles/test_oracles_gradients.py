"""The gradient oracle alone: exact gradients pass, one fault is convicted and located, a wrong
forward excuses nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from references.masks import Causal
from tests.harness.fake_trials import (
    DECLARED,
    EMPTY,
    PLAIN,
    acquitted,
    convicted,
    right_run,
    trial_of,
)
from verify.cell.process import Reply
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.oracles import bound, gradient_sums, repeat
from verify.variant import GradientNumerics

torch.set_num_threads(1)


def tried(problem=PLAIN, plant: Callable[[dict[str, Tensor]], None] | None = None) -> Trial:
    """A backward trial whose forward saved exact tensors, and whose gradients are exact but for
    what `plant` does."""
    trial = trial_of(problem, gradients=GradientNumerics(), entries=("forward", "backward"))
    trial.entry = "backward"
    trial.launches["saved"] = right_run(trial)
    exact = {
        name: getattr(trial.gradients, name).to(problem.format.torch) for name in ("dq", "dk", "dv")
    }
    if plant is not None:
        plant(exact)
    trial.launches["first"] = Launch(Reply("ok"), "nan", exact)
    return trial


def test_exact_gradients_pass() -> None:
    for problem in (
        PLAIN,
        EMPTY,
        PLAIN.but(dtype="float16", mask=Causal()),
        PLAIN.but(softmax_scale=-1.0),
    ):
        ruling = bound.judge_backward(tried(problem))
        assert acquitted(ruling)
        assert {"r_dq", "r_dk", "r_dv", "worst_index_dk", "worst_bound_dv", "max_error_dq"} <= set(
            ruling.measures
        )
        assert max(ruling.measures[f"r_{name}"] for name in ("dq", "dk", "dv")) <= 1


def test_one_element_out_of_bounds_is_convicted_and_located() -> None:
    for name, place in (
        ("dq", "dq[b=1, h=0, q=2, d=3]"),
        ("dk", "dk[b=1, h=0, k=2, d=3]"),
        ("dv", "dv[b=1, h=0, k=2, d=3]"),
    ):

        def plant(exact: dict[str, Tensor], name: str = name) -> None:
            exact[name][1, 0, 2, 3] += 0.01

        finding = convicted(bound.judge_backward(tried(plant=plant)), f"{name} is off by 0.01")
        assert (finding.oracle, finding.where, finding.count) == ("gradient_bound", place, 1)


def test_an_infinite_gradient_that_is_right_breaks_no_sum() -> None:
    """dV of fp16 overflows: its sums say nothing then, and the sums over dK still do."""
    problem = PLAIN.but(dtype="float16", softmax_scale=0.01)
    trial = trial_of(problem, gradients=GradientNumerics(), entries=("forward", "backward"))
    trial.entry = "backward"
    trial.__dict__["dout"] = torch.full(problem.shape_out, 60000.0, dtype=torch.float16)
    trial.launches["saved"] = right_run(trial)
    exact = {name: getattr(trial.gradients, name).to(torch.float16) for name in ("dq", "dk", "dv")}
    assert bool(exact["dv"].isinf().any())
    trial.launches["first"] = Launch(Reply("ok"), "nan", exact)
    assert acquitted(bound.judge_backward(trial))
    assert acquitted(gradient_sums.judge(trial))
    exact["dk"][0, 0, 0, 0] = torch.inf
    convicted(gradient_sums.judge(trial), "sum dK = 0 does not hold")


def test_not_a_number_is_convicted() -> None:
    finding = convicted(
        bound.judge_backward(tried(plant=lambda exact: exact["dv"][0, 1].fill_(torch.nan)))
    )
    assert finding.count == PLAIN.seqlen_kv * PLAIN.head_dim


def test_a_row_without_a_key_has_no_gradient() -> None:
    """Sequence 1 sees nothing: exactly zero, without tolerance."""
    convicted(
        bound.judge_backward(tried(EMPTY, lambda exact: exact["dk"][1, 0, 3].fill_(1e-30))),
        "dk is off by",
    )


def test_a_wrong_forward_excuses_nothing() -> None:
    trial = tried()
    out = trial.saved.outputs["out"].clone()
    out[0, 0, 0, 0] += 1.0
    trial.launches["saved"] = Launch(
        Reply("ok"), "nan", {"out": out, "lse": trial.saved.outputs["lse"]}
    )
    convicted(bound.judge_backward(trial), "saved out is off by 1")
    trial = tried()
    lse = trial.saved.outputs["lse"] + 1.0
    trial.launches["saved"] = Launch(
        Reply("ok"), "nan", {"out": trial.saved.outputs["out"], "lse": lse}
    )
    convicted(bound.judge_backward(trial), "saved lse is off by 1")


def test_gradients_too_must_repeat() -> None:
    trial = tried()
    again = {name: tensor.clone() for name, tensor in trial.first.outputs.items()}
    trial.launches["again"] = Launch(Reply("ok"), "huge", again)
    assert acquitted(repeat.judge(trial))
    again["dk"][0, 1, 4, 0] *= 1 + 2**-20
    convicted(repeat.judge(trial), "dk differs", "dk[b=0, h=1, k=4, d=0]")
    assert repeat.ORACLES[1].excludes(DECLARED) is None
