"""The oracles that multiply inputs by powers of two: results scale bit for bit, unless something
absolute hides in a kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from references.masks import Causal, Lengths
from tests.harness.declared import flat_gradients, with_fields
from tests.harness.fake_trials import DECLARED, acquitted, convicted
from tests.harness.reference_kernel import Hand, faulty, tried_by
from verify.judging.power_scaling import Powers, powers, scaled, tamed, times
from verify.oracles import bound, power_of_two
from verify.problem import Problem
from verify.variant import Config, Contract

torch.set_num_threads(1)

SHAPE = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seqlen_q": 24, "seqlen_kv": 70, "head_dim": 32}
DTYPES = ("float16", "bfloat16", "float32")


def problem(dtype: str = "float16", **changes: object) -> Problem:
    return Problem(
        **(
            SHAPE
            | {"dtype": dtype, "distribution": "octaves", "mask": Causal(), "seed": 1}
            | changes
        )
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_honest_kernel_scales(dtype: str) -> None:
    for seed in range(4):
        for case in (
            problem(dtype, seed=seed),
            problem(dtype, seed=seed, mask=Lengths((24, 5), (70, 0))),
        ):
            trial = tried_by(Hand(), case)
            assert power_of_two.FORWARD.concerns(trial)
            assert acquitted(power_of_two.judge(trial))
            backward = tried_by(Hand(), case, "backward")
            assert power_of_two.BACKWARD.concerns(backward)
            assert acquitted(power_of_two.judge_backward(backward))


def test_both_directions_are_asked_as_far_as_the_format_goes() -> None:
    found = {seed: powers(tried_by(Hand(), problem(seed=seed))) for seed in range(2)}
    assert found == {0: Powers(12, -12), 1: Powers(-12, 14)}
    wide = [powers(tried_by(Hand(), problem("bfloat16", seed=seed))) for seed in range(2)]
    assert wide == [Powers(40, -40), Powers(-40, 40)]
    assert not powers(tried_by(Hand(), problem(seqlen_kv=0)))
    assert not powers(tried_by(Hand(), problem(softmax_scale=40.0))), "weights would underflow"
    assert tamed(problem(softmax_scale=-40.0), DECLARED.support).scale == -(32**-0.5)
    prescaled = with_fields(DECLARED.numerics, prescale="q")
    assert (
        powers(tried_by(Hand(), problem(seed=1, softmax_scale=2.0**-10), numerics=prescaled)).keys
        == -2
    )


FLUSH = faulty(finish=lambda x: torch.where(x.abs() < 2.0**-13, 0.0, x))
FAULTS = {
    "small outputs flushed": FLUSH,
    "an epsilon added to O": faulty(finish=lambda x: x + 1e-6),
    "values clamped": faulty(load=lambda name, x: x.clamp(-1000, 1000)),
    "q normalised with an epsilon": faulty(
        load=lambda name, x: x * (1 - 1e-6 / (x.norm(dim=-1, keepdim=True) + 1e-6))
    ),
    "sums in fp16": faulty(product=torch.float16),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_absolute_is_convicted(name: str) -> None:
    rulings = [power_of_two.judge(tried_by(FAULTS[name], problem(seed=seed))) for seed in range(2)]
    finding = next(ruling for ruling in rulings if ruling.finding is not None)
    convicted(finding, "should keep its bits")


def test_a_clamp_at_a_thousand_looks_right_elsewhere() -> None:
    for name in ("values clamped", "an epsilon added to O", "small outputs flushed"):
        for distribution in ("normal", "v_mean"):
            trial = tried_by(FAULTS[name], problem(distribution=distribution))
            assert acquitted(bound.judge(trial))


def test_a_kernel_that_repeats_no_bits_is_held_to_its_bound() -> None:
    free = Contract(deterministic=False)
    for seed in range(2):
        assert acquitted(power_of_two.judge(tried_by(Hand(), problem(seed=seed), contract=free)))
    shaken = faulty(finish=lambda x: x * (1 + 2**-20))
    assert acquitted(power_of_two.judge(tried_by(shaken, problem(), contract=free)))
    convicted(
        power_of_two.judge(tried_by(FAULTS["values clamped"], problem(), contract=free)),
        "out is off by",
    )
    assert (
        power_of_two.BACKWARD.excludes(replace(DECLARED, contract=free))
        == "declared not deterministic"
    )


def tiny(x: Tensor) -> Tensor:
    """Score gradients below 1e-6 are dropped."""
    return torch.where(x.abs() < 1e-6, 0.0, x)


BACKWARD_FAULTS = {
    "small dS dropped": faulty(dscores=tiny),
    "an epsilon in delta": faulty(delta=lambda x: x + 1e-5),
    "keys clamped": faulty(load=lambda name, x: x.clamp(-8, 8)),
}


@pytest.mark.parametrize("name", BACKWARD_FAULTS)
def test_what_is_absolute_in_a_backward_is_convicted(name: str) -> None:
    found = []
    for seed in (0, 1, 2, 3):
        case = problem("bfloat16", seed=seed)
        trial = tried_by(BACKWARD_FAULTS[name], case, "backward")
        a, g = power_of_two.exponents(trial)
        honest = tried_by(Hand(), case)
        inputs, dout = scaled(trial, Powers(a, 0)), times(trial.dout, 2.0**g)
        other = honest.beside("power_of_two_backward", case, inputs=inputs)
        # The forward is another kernel, and right.
        trial.launches["saved"] = honest.first
        trial.beside("power_of_two_backward", case, inputs=inputs, dout=dout).launches["saved"] = (
            other.first
        )
        found.append(power_of_two.judge_backward(trial))
    finding = next(ruling for ruling in found if ruling.finding is not None)
    convicted(finding, "should keep its bits")


def test_a_small_epsilon_in_delta_looks_right_elsewhere() -> None:
    case = problem("bfloat16", distribution="normal")
    for name in ("small dS dropped", "an epsilon in delta", "keys clamped"):
        trial = tried_by(
            BACKWARD_FAULTS[name], case, "backward", configs=(Config(block_m=16, block_n=32),)
        )
        trial.launches["saved"] = tried_by(Hand(), case).first
        assert acquitted(bound.judge_backward(trial))


def test_dout_is_scaled_in_every_dtype_and_queries_too() -> None:
    pairs = {
        dtype: [
            power_of_two.exponents(tried_by(Hand(), problem(dtype, seed=s), "backward"))
            for s in range(8)
        ]
        for dtype in ("float16", "bfloat16")
    }
    for found in pairs.values():
        assert all(a != 0 for a, _ in found)
        assert {g > 0 for _, g in found if g} == {True, False}
    assert [g == 0 for _, g in pairs["float16"]] == [True] * 4 + [False] * 4, (
        "where dS is fp16, every other problem"
    )
    assert all(g for _, g in pairs["bfloat16"])


def test_what_the_scale_has_multiplied_stays_normal() -> None:
    found = {}
    for name in ("none", "k", "sqrt"):
        declared = flat_gradients(prescale=name)
        trials = [
            tried_by(
                Hand(), problem(seed=seed, softmax_scale=2.0**-10), "backward", gradients=declared
            )
            for seed in range(2)
        ]
        found[name] = [power_of_two.exponents(trial)[0] for trial in trials]
    assert found == {"none": [12, -12], "k": [2, -12], "sqrt": [7, -7]}


def test_short_accumulators_are_not_asked() -> None:
    narrow = replace(DECLARED, numerics=with_fields(DECLARED.numerics, accumulator="float16"))
    for oracle in (power_of_two.FORWARD, power_of_two.BACKWARD):
        assert oracle.excludes(DECLARED) is None
        assert oracle.excludes(narrow) == "accumulates in float16, whose range is short"
