"""Oracles whose sums are exact: integer scores, and powers of two as weights."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from references.masks import Causal, Lengths, Window
from tests.harness.declared import with_fields
from tests.harness.fake_trials import DECLARED, acquitted, convicted, tried
from tests.harness.reference_kernel import Hand, faulty, tried_by, truncated
from verify.arithmetic.instructions import EXP
from verify.arithmetic.mma import unit_for
from verify.judging.trial import Trial
from verify.oracles import bound, dyadic, integer_scores
from verify.problem import Problem
from verify.problem.known_answers import DYADIC_RANGE
from verify.tolerance.exact_sums import exact_below
from verify.variant import Contract

torch.set_num_threads(1)

SHAPE = {
    "batch": 2,
    "heads_q": 4,
    "heads_kv": 2,
    "seqlen_q": 40,
    "seqlen_kv": 90,
    "head_dim": 64,
    "seed": 5,
}
MASKS = (Causal(), Window(20, 0), Lengths((40, 17), (90, 33)))
DTYPES = ("float16", "bfloat16", "float32")


def problem(distribution: str, dtype: str = "float16", **changes: object) -> Problem:
    return Problem(**(SHAPE | {"dtype": dtype, "distribution": distribution} | changes))


def looks_right(hand: Hand) -> bool:
    """What a suite says that compares normal inputs with a tolerance of 1e-2."""
    trial = tried_by(hand, problem("normal"))
    assert trial.first.out is not None
    return torch.allclose(trial.first.out.double(), trial.truth.out, atol=1e-2, rtol=1e-2)


# Integer scores.


def scored(
    dtype: str = "float16", distribution: str = "integer_scores", **changes: object
) -> Problem:
    return integer_scores.rescaled(problem(distribution, dtype, **changes), DECLARED.support)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_scores_leave_an_honest_kernel_within_the_rest(dtype: str) -> None:
    for mask in MASKS:
        for case in (
            scored(dtype, mask=mask),
            scored(dtype, "small_integers", mask=mask, softmax_scale=-0.01),
        ):
            trial = tried_by(Hand(), case)
            assert integer_scores.ORACLE.concerns(trial)
            ruling = integer_scores.judge(trial)
            assert acquitted(ruling)
            assert 0 < ruling.measures["exact_scores_r_out"] <= 1
    assert acquitted(integer_scores.judge(tried(scored(dtype))))


def short(name: str, x: Tensor) -> Tensor:
    """The last 8 elements of head_dim are not read."""
    return x if name == "v" else torch.nn.functional.pad(x[..., :-8], (0, 8))


def swapped(name: str, x: Tensor) -> Tensor:
    """K with two fragments exchanged."""
    return torch.cat([x[..., 8:16], x[..., :8], x[..., 16:]], -1) if name == "k" else x


def thirteen_bits(x: Tensor) -> Tensor:
    """Truncated to 13 fraction bits, as the 8-bit units of Hopper do."""
    return (x.view(torch.int32) & ~0x3FF).view(torch.float32)


SCORE_FAULTS = {
    "fp16 accumulator": faulty(scores=lambda x: x.half().float()),
    "bf16 accumulator": faulty(scores=lambda x: x.bfloat16().float()),
    "13-bit accumulator": faulty(scores=thirteen_bits),
    "head_dim cut short": faulty(load=short),
    "fragments swapped": faulty(load=swapped),
}


@pytest.mark.parametrize("name", SCORE_FAULTS)
def test_scores_that_are_not_exact_are_convicted(name: str) -> None:
    ruling = integer_scores.judge(tried_by(SCORE_FAULTS[name], scored()))
    assert convicted(ruling, "out is off by").oracle == "integer_scores"


def test_a_narrow_accumulator_looks_right_elsewhere() -> None:
    assert looks_right(SCORE_FAULTS["fp16 accumulator"])
    narrow = SCORE_FAULTS["13-bit accumulator"]
    assert looks_right(narrow)
    for distribution in ("normal", "outliers"):
        assert acquitted(
            bound.judge(tried_by(narrow, problem(distribution), contract=Contract(lse=None)))
        )


def test_integers_are_exact_below_what_a_unit_holds() -> None:
    limits = {
        ("sm_90", "float16"): 24,
        ("sm_70", "float16"): 23,
        ("sm_90", "float8_e4m3fn"): 13,
        ("cpu", "float32"): 24,
    }
    for (arch, operands), power in limits.items():
        assert exact_below(unit_for(arch, operands)) == 2.0**power
    assert exact_below(unit_for("sm_90", "float16", "float16")) == 2.0**11
    for dtype in ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"):
        for head_dim in (16, 64, 512):
            trial = tried_by(Hand(), scored(dtype, head_dim=head_dim))
            q, k, _ = trial.expanded
            sums = q.double().abs() @ k.double().abs().repeat_interleave(2, 1).mT
            assert float(sums.max()) < (2.0**13 if "8" in dtype else 2.0**23)
            scores = q.double() @ k.double().repeat_interleave(2, 1).mT
            assert float(scores.abs().max()) < 130


def test_a_scale_that_is_no_power_of_two_before_the_product_makes_scores_inexact() -> None:
    trial = tried_by(
        Hand(),
        scored().but(softmax_scale=0.1),
        numerics=with_fields(DECLARED.numerics, prescale="q"),
    )
    assert not integer_scores.ORACLE.concerns(trial)
    assert scored(softmax_scale=-0.3).scale == -0.25
    only = replace(DECLARED.support, scales="default")
    assert integer_scores.rescaled(problem("integer_scores"), only).scale == 0.125


# Powers of two as weights.


def weighted(dtype: str = "float16", **changes: object) -> Problem:
    return problem("dyadic", dtype, **({"softmax_scale": math.log(2)} | changes))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_powers_of_two_give_what_was_expected(dtype: str) -> None:
    for mask in MASKS:
        for scale in (math.log(2), -math.log(2)):
            case = weighted(dtype, mask=mask, softmax_scale=scale)
            assert acquitted(dyadic.judge(tried_by(Hand(), case)))
    want = dyadic.answer(trial := tried(weighted(dtype, mask=MASKS[0])))
    assert torch.allclose(want.out, trial.truth.out, rtol=1e-12, atol=1e-15)
    assert torch.allclose(want.lse, trial.truth.lse, rtol=1e-12, atol=1e-15)
    assert acquitted(dyadic.judge(trial))


def cubic(x: Tensor) -> Tensor:
    """Off by 8.8e-5, as a polynomial of degree 3 in place of the hardware's exponential."""
    return torch.exp2(x) * (1 + 8.8e-5 * torch.cos(x.clamp(min=-30.0) * 3 + 1))


WEIGHT_FAULTS = {
    "cubic exponential": faulty(exp2=cubic),
    "outputs truncated": faulty(store=truncated),
    "outputs rounded twice": faulty(finish=lambda x: (x * 2**12).round() / 2**12),
    "fp16 accumulator of P V": faulty(product=torch.float16),
    "a rescale lost": faulty(rescale=False),
    "base e": faulty(exp2=torch.exp),
}


@pytest.mark.parametrize("name", WEIGHT_FAULTS)
def test_weights_that_are_no_powers_of_two_are_convicted(name: str) -> None:
    convicted(
        dyadic.judge(tried_by(WEIGHT_FAULTS[name], weighted())), "all weights are powers of two"
    )


def test_only_exact_weights_show_a_truncated_output() -> None:
    for name in (
        "cubic exponential",
        "outputs truncated",
        "outputs rounded twice",
        "fp16 accumulator of P V",
    ):
        assert looks_right(WEIGHT_FAULTS[name])
    truncating = tried_by(WEIGHT_FAULTS["outputs truncated"], problem("normal"))
    assert acquitted(bound.judge(truncating))


def test_the_lse_of_exact_weights_is_checked_too() -> None:
    def plant(out: Tensor, lse: Tensor) -> None:
        lse[1, 2, 7] += 5e-5

    finding = convicted(dyadic.judge(tried(weighted(), plant)), "lse is")
    assert (finding.where, finding.count) == ("lse[b=1, h=2, q=7]", 1)


def on(arch: str, trial: Trial) -> Trial:
    """The same trial on another machine."""
    trial.arch = arch
    return trial


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_exponential_that_is_exact_at_integers_leaves_one_rounding(dtype: str) -> None:
    for mask in MASKS:
        want = dyadic.answer(trial := on("sm_90", tried_by(Hand(), weighted(dtype, mask=mask))))
        assert float((want.slack - 3.1e-7 * want.out.abs()).max()) <= 0
        assert acquitted(dyadic.judge(trial))


def one_ulp(x: Tensor) -> Tensor:
    """One unit in the last place too much, at odd integers: at all of them it would cancel."""
    found = torch.exp2(x)
    return torch.where(x % 2 == 1, torch.nextafter(found, 2 * found), found)


def test_one_ulp_of_a_weight_is_convicted_where_exponentials_are_exact() -> None:
    case = weighted("float32", mask=Causal())
    finding = convicted(
        dyadic.judge(on("sm_90", tried_by(faulty(exp2=one_ulp), case))),
        "all weights are powers of two",
    )
    assert finding.where.startswith("out[")
    for arch in ("cpu", "sm_80", "sm_100"):
        assert acquitted(dyadic.judge(on(arch, tried_by(faulty(exp2=one_ulp), case)))), arch
    for numerics in (with_fields(DECLARED.numerics, exp="exp2f"), DECLARED.numerics):
        asked = on("sm_90", tried_by(faulty(exp2=one_ulp), case, numerics=numerics))
        assert not acquitted(dyadic.judge(asked))


def test_the_division_that_is_declared_is_all_that_is_allowed() -> None:
    case = weighted("float32")
    for division, roundings in (("any", 5), ("div.rn", 1), ("rcp.approx", 3)):
        numerics = with_fields(DECLARED.numerics, division=division)
        want = dyadic.answer(on("sm_90", tried_by(Hand(), case, numerics=numerics)))
        assert torch.allclose(want.slack, roundings * 2.0**-24 * want.out.abs(), rtol=1e-6, atol=0)
        assert acquitted(dyadic.judge(on("sm_90", tried_by(Hand(), case, numerics=numerics))))

    def rough(x: Tensor) -> Tensor:
        return x * (1 + 3 * 2.0**-23)

    careless = faulty(finish=rough)
    assert acquitted(
        dyadic.judge(on("sm_90", tried_by(faulty(finish=lambda x: x * (1 + 2.0**-23)), case)))
    )
    assert not acquitted(dyadic.judge(on("sm_90", tried_by(careless, case))))


def test_arches_of_exact_exponentials_are_those_that_were_measured() -> None:
    """Every committed report of a device says what the table says."""
    measured: dict[str, dict[str, bool]] = {}
    for path in (Path(__file__).parents[3] / "reports").glob("*/probes.json"):
        report = json.loads(path.read_text(encoding="utf-8"))
        for probe in report["functions"]:
            name = {"ex2.approx.ftz.f32": "ex2.approx", "ex2.approx.f32": "ex2.approx"}.get(
                probe["name"], probe["name"]
            )
            if probe["integers"]:
                exact = measured.setdefault(report["arch"].rstrip("a"), {})
                exact[name] = (
                    exact.get(name, True) and probe["integers"] == "exact from -126 to 127"
                )
    assert measured["sm_90"] == {"ex2.approx": True, "exp2f": True}
    for name, function in EXP.items():
        assert {arch for arch, exact in measured.items() if exact.get(name)} == set(
            function.exact_at_integers
        ), name


def test_who_has_no_exact_weights_is_not_asked() -> None:
    reason = dyadic.ORACLE.excludes
    assert reason(DECLARED) is None
    for field, value, words in (
        ("exp", "expf", "no exponential in base 2"),
        ("scale_roundings", 3, "one factor"),
        ("prescale", "q", "before the product"),
        ("normalised", True, "normalised"),
        ("split_keys", True, "merges"),
    ):
        told = reason(replace(DECLARED, numerics=with_fields(DECLARED.numerics, **{field: value})))
        assert words in str(told)
    assert "default scale" in str(
        reason(replace(DECLARED, support=replace(DECLARED.support, scales="default")))
    )


def test_dyadic_scores_stay_in_their_range() -> None:
    for head_dim in (1, 16, 80):
        trial = tried_by(Hand(), weighted(head_dim=head_dim))
        scores = trial.expanded[0].double() @ trial.expanded[1].double().repeat_interleave(2, 1).mT
        assert float(scores.amax() - scores.amin()) <= DYADIC_RANGE
        assert (
            head_dim == 1 or float((scores.cummax(-1).values.diff(dim=-1) > 0).sum(-1).max()) >= 3
        )
