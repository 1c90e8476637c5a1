"""The oracles that need no reference: outputs are averages, and gradients add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from references.masks import Causal, Dense, Documents, Lengths, Window, intersect
from references.score_mods import Softcap
from tests.harness.backward_inputs import Inputs
from tests.harness.declared import flat_numerics
from tests.harness.emulation import Luck
from tests.harness.emulation_backward import emulate
from tests.harness.fake_trials import (
    DECLARED,
    EMPTY,
    OK,
    PLAIN,
    acquitted,
    convicted,
    trial_of,
    tried,
)
from tests.harness.honest_backwards import HALF, HONEST, SHAPES, UNUSUAL, arithmetic
from tests.harness.reference_kernel import Hand, faulty, tried_by
from tests.properties import tier
from verify.judging.gradient_invariants import GradientTensors, Invariant, invariants
from verify.judging.invariants import KNOWN, beyond, forward_slack, reach
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.judging.truth import compute_truth
from verify.oracles import convexity, gradient_sums
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.problem.visibility import live_rows, visible_range
from verify.tolerance.resolution import resolve
from verify.variant import Config, GradientNumerics

torch.set_num_threads(1)

LONG = PLAIN.but(seqlen_q=40, seqlen_kv=70, dtype="float16", mask=Causal())
MASKS = (
    Causal(),
    Window(7, 2),
    Lengths((40, 11), (70, 0)),
    Documents((10, 20, 40)),
    intersect(Causal(), Lengths((40, 4), (70, 9))),
    Dense(60, 3),
)

# Averages.


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
def test_the_range_is_that_of_the_keys_that_a_row_sees(mask) -> None:
    case = LONG.but(mask=mask)
    v = tried(case).expanded[2].double()
    low, high = visible_range(case, v)
    seen = case.mask.dense(2, 4, 40, 70)
    assert torch.equal(live_rows(case), seen.any(-1))
    if isinstance(mask, Dense):
        assert torch.equal(low, v.amin(2, keepdim=True))
        return
    for b, h, i in (seen.any(-1) & (torch.arange(4) % 2 == 0)[:, None]).nonzero().tolist():
        rows = v[b, h // 2][seen[b, h, i]]
        assert torch.equal(low[b, h // 2, i], rows.amin(0))
        assert torch.equal(high[b, h // 2, i], rows.amax(0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_honest_averages_stay_in_range(dtype: str) -> None:
    for mask in MASKS:
        for distribution in ("normal", "ones_v", "v_mean", "sink", "subnormals"):
            trial = tried_by(Hand(), LONG.but(mask=mask, distribution=distribution, dtype=dtype))
            ruling = convexity.judge(trial)
            assert acquitted(ruling)
            assert ruling.measures["convexity_r"] <= 1
            assert "truth" not in trial.__dict__, "no reference was computed"
    assert acquitted(convexity.judge(tried(EMPTY)))


AVERAGE_FAULTS = {
    "not normalised": (faulty(finish=lambda x: 1.01 * x), "ones_v"),
    "a rescale lost": (faulty(rescale=False), "v_mean"),
    "a mean that shrinks": (faulty(finish=lambda x: x * (1 - 2**-9)), "ones_v"),
    "V of the next head": (
        faulty(load=lambda name, x: x.roll(1, 1) if name == "v" else x),
        "v_mean",
    ),
    "V of the next key": (
        faulty(load=lambda name, x: x.roll(-1, 2) if name == "v" else x),
        "window of two",
    ),
    "NaN": (faulty(finish=lambda x: x * torch.nan), "normal"),
}


@pytest.mark.parametrize("name", AVERAGE_FAULTS)
def test_what_is_no_average_is_convicted(name: str) -> None:
    hand, distribution = AVERAGE_FAULTS[name]
    case = (
        LONG.but(mask=Window(1, 0))
        if distribution == "window of two"
        else LONG.but(distribution=distribution)
    )
    convicted(convexity.judge(tried_by(hand, case)), "but the row sees only V between")


def test_one_element_out_of_range_is_named() -> None:
    def plant(out: Tensor, lse: Tensor) -> None:
        out[1, 2, 30, 4] = 5.0

    finding = convicted(convexity.judge(tried(LONG, plant)), "out is 5 at out[b=1, h=2, q=30, d=4]")
    assert (finding.where, finding.count) == ("out[b=1, h=2, q=30, d=4]", 1)


def test_an_infinity_is_an_average_only_beyond_the_format() -> None:
    def plant(out: Tensor, lse: Tensor) -> None:
        out[0, 0, 39, 0] = torch.inf

    trial = tried(LONG, plant)
    convicted(convexity.judge(trial), "out is inf")
    trial = tried(LONG, plant)
    trial.expanded[2][0, 0, 5, 0] = 65504.0  # the bound reaches past where fp16 overflows
    assert acquitted(convexity.judge(trial))


def test_averages_know_which_numerics_they_know() -> None:
    excludes = convexity.ORACLE.excludes
    assert excludes(DECLARED) is None
    lse = replace(DECLARED, numerics=flat_numerics(normaliser="lse"))
    assert (
        excludes(lse) == "declares numerics.output.normaliser = 'lse', for which nothing is derived"
    )
    assert beyond(flat_numerics(accumulator="float16"), KNOWN) is not None
    assert not convexity.ORACLE.concerns(trial_of(PLAIN.but(seqlen_kv=0)))
    huge = PLAIN.but(seqlen_q=1 << 17, seqlen_kv=1 << 17, mask=Dense(50, 1))
    assert not convexity.ORACLE.concerns(trial_of(huge))
    assert convexity.ORACLE.concerns(trial_of(huge.but(mask=Causal())))


@pytest.mark.parametrize("text", SHAPES)
def test_slacks_from_norms_are_no_less_than_the_errors_that_they_stand_for(text: str) -> None:
    for dtype, distribution in (
        ("float16", "normal"),
        ("bfloat16", "large_logits"),
        ("float32", "sink"),
    ):
        case = Problem.parse(f"{text},dtype={dtype},dist={distribution}")
        arithmetic = resolve(flat_numerics(block_n=32), Config(), case, "sm_90")
        given = Inputs.of(case)
        truth = compute_truth(case, (given.q, given.k, given.v), [arithmetic])
        qkv = (given.q, given.k, given.v)
        slack = forward_slack(case, arithmetic, reach(case, given.q, given.k), qkv)
        live = ~truth.empty
        assert bool((slack.lse >= 0.999 * truth.lse_bound)[live].all())


# Sums of gradients.


def sums_of(
    case: Problem, kernel, declared, luck: Luck = Luck.NEAREST, aim: str = "dq"
) -> list[Invariant]:
    """Each invariant of an emulated backward, by slacks that need no reference."""
    saved, found = emulate(case, kernel, luck, aim)
    given = Inputs.of(case)
    gradients = GradientTensors(
        given.q,
        given.k,
        given.v,
        given.dout,
        saved.out,
        saved.lse.double(),
        found["dq"],
        found["dk"],
        found["dv"],
    )
    forward = resolve(declared.forward.numerics, Config(), case, declared.arch)
    return invariants(case, gradients, forward, arithmetic(case, declared))


def worst(found: list[Invariant]) -> dict[str, float]:
    ratios = {}
    for one in found:
        error = (one.left - one.right).abs()
        ratio = torch.where((error == 0) | (one.slack == torch.inf), 0.0, error / one.slack)
        ratios[one.name] = float(ratio.nan_to_num(nan=torch.inf).max())
    return ratios


SUMMED = HONEST + tuple(
    kernel
    for kernel in UNUSUAL
    if kernel.numerics.score_gradient.delta == "float32"
    and (kernel.numerics.score_gradient.scaled or kernel.numerics.softmax.source == "own")
)


@pytest.mark.parametrize("kernel", tier.for_ci(SUMMED, keep=2), ids=lambda kernel: kernel.name)
def test_honest_gradients_add_up_without_a_reference(kernel) -> None:
    for number, text in enumerate(SHAPES):
        for dtype in kernel.dtypes:
            distribution = ordinary()[(3 * number + len(kernel.name)) % len(ordinary())]
            case = Problem.parse(f"{text},dtype={dtype},dist={distribution},seed={number}")
            luck, aim = list(Luck)[number % 2], ("dq", "dk", "dv")[number % 3]
            found = worst(sums_of(case, kernel, kernel, luck, aim))
            assert max(found.values()) <= 1, case.name
            assert set(found) == {"dv", "dq", "dv_v"} | ({"dk"} if not case.score_mod else set())


SUM_FAULTS = {
    "drops the last block": "dv",
    "a lost pair of blocks": "dv",
    "first head of a group alone": "dv",
    "LSE of the other base": "dv",
    "causal off by one": "dv",
    "mask in the forward alone": "dv",
    "no delta": "dk",
    "delta without O": "dk",
    "delta of the next row": "dk",
}


@pytest.mark.parametrize("name", SUM_FAULTS)
def test_gradients_that_do_not_add_up_are_seen_without_a_reference(name: str) -> None:
    case = Problem.parse("hq=2,hkv=1,sq=64,skv=64,d=64,mask=causal,dtype=float16,seed=3")
    assert worst(sums_of(case, HALF.but(fault=name), HALF))[SUM_FAULTS[name]] > 2


def tried_gradients(case: Problem, kernel=HALF) -> Trial:
    """The trial of an emulated backward that declares HALF's arithmetic."""
    saved, found = emulate(case, kernel)
    trial = trial_of(
        case,
        gradients=HALF.numerics,
        numerics=HALF.forward.numerics,
        entries=("forward", "backward"),
    )
    trial = replace(trial, arch=HALF.arch, entry="backward")
    trial.launches["saved"] = Launch(OK, "nan", {"out": saved.out, "lse": saved.lse})
    trial.launches["first"] = Launch(OK, "nan", dict(found))
    return trial


GROUPED = Problem.parse("b=2,hq=4,hkv=2,sq=48,skv=64,d=32,mask=causal,dtype=float16,seed=3")


@pytest.mark.parametrize(
    "changes", [{}, {"score_mod": Softcap(2.0)}, {"mask": Lengths((48, 0), (64, 9))}], ids=str
)
def test_honest_gradients_add_up(changes: dict[str, object]) -> None:
    ruling = gradient_sums.judge(tried_gradients(GROUPED.but(**changes)))
    assert acquitted(ruling)
    names = {"dv", "dq", "dv_v"} | (set() if "score_mod" in changes else {"dk"})
    assert set(ruling.measures) == {f"gradient_sums_{name}" for name in names}


@pytest.mark.parametrize("name", tier.for_ci([*SUM_FAULTS, "no scale in dK"], keep=3))
def test_gradients_that_do_not_add_up_are_convicted(name: str) -> None:
    words = {"dv": "sum dV = sum dO does not hold", "dk": "sum dK = 0 does not hold"}
    expected = words.get(SUM_FAULTS.get(name, ""), "<dQ, Q> = <dK, K> does not hold")
    convicted(gradient_sums.judge(tried_gradients(GROUPED, HALF.but(fault=name))), expected)


def test_a_key_without_its_gradient_breaks_every_sum() -> None:
    for name, words in (
        ("dv", "sum dV = sum dO"),
        ("dk", "sum dK = 0"),
        ("dq", "<dQ, Q> = <dK, K>"),
    ):
        trial = tried_gradients(GROUPED)
        trial.first.outputs[name][1, 1, 2] = 0.0
        finding = convicted(
            gradient_sums.judge(trial),
            f"{words} does not hold at [b=1, h={0 if name == 'dq' else 1}",
        )
        assert finding.oracle == "gradient_sums"
    trial = tried_gradients(GROUPED)
    trial.first.outputs["dq"][0, 3, 5] = torch.nan
    convicted(gradient_sums.judge(trial), "<dQ, Q> = <dK, K> does not hold at [b=0, h=1]")


def test_who_declares_no_gradients_is_not_asked() -> None:
    excludes = gradient_sums.ORACLE.excludes
    assert excludes(DECLARED) == "declares no gradients"
    assert excludes(replace(DECLARED, gradients=GradientNumerics())) is None
