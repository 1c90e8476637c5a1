"""A weight of 16 bits that was divided is rounded again."""

from __future__ import annotations

import pytest

from tests.harness.declared import flat_numerics
from tests.harness.emulation import Kernel, Luck, emulate
from tests.harness.fake_trials import OK, acquitted, convicted, trial_of
from verify.judging.findings import first, place
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.oracles import bound
from verify.problem import Problem
from verify.tolerance.resolution import resolve
from verify.variant import Config, Numerics


def tried(case: Problem, numerics: Numerics, luck: Luck) -> Trial:
    """The trial of what an honest kernel gives on an A100."""
    trial = trial_of(case, numerics=numerics)
    trial.arch = "sm_80"
    result = emulate(
        case,
        Kernel(
            "honest",
            numerics,
            arch="sm_80",
            style="eager" if numerics.output.normalised else "online",
        ),
        luck,
    )
    trial.launches["first"] = Launch(OK, "nan", {"out": result.out, "lse": result.lse})
    return trial


@pytest.mark.parametrize(
    ("exp", "dtype"), [("ex2.approx.f16", "float16"), ("ex2.approx.ftz.bf16", "bfloat16")]
)
def test_a_weight_of_16_bits_that_was_divided_is_rounded_again(exp: str, dtype: str) -> None:
    """What an exponential gives in 16 bits is exact in P's dtype; its quotient by the row sum is
    not."""
    numerics = {
        normalised: flat_numerics(exp=exp, normalised=normalised, block_n=0)
        for normalised in (False, True)
    }
    case = Problem(
        batch=2,
        heads_q=3,
        heads_kv=3,
        seqlen_q=17,
        seqlen_kv=3,
        head_dim=24,
        dtype=dtype,
        distribution="v_mean",
    )
    roundoffs = [
        resolve(n, Config(), case, "sm_80").probability_roundoff for n in numerics.values()
    ]
    assert roundoffs == [0.0, case.format.unit_roundoff]
    for seed in range(12):
        for kind in numerics.values():
            for luck in Luck:
                trial = tried(case.but(seed=seed), kind, luck)
                assert acquitted(bound.judge(trial))
        past = (trial.truth.out + 1.2 * trial.truth.out_bound).to(case.format.torch)
        at = first(
            ((past.double() - trial.truth.out).abs() > trial.truth.out_bound) & past.isfinite()
        )
        trial.first.outputs["out"][at] = past[at]
        convicted(bound.judge(trial), place("out", at))
