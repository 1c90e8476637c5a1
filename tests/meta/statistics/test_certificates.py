"""Certificates: a fault of 1.3 times the certified strength fails in the case that certifies it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.harness.emulation_backward import emulate
from tests.harness.fake_trials import OK, trial_of
from tests.harness.honest_backwards import HALF
from verify.judging.findings import Ruling
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.oracles import bound
from verify.problem import Problem
from verify.statistics import power

pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES = ("scale", "exponent", "lse", "key", "out", "element")
CASES = tuple(
    f"b=1,hq=2,hkv=2,sq=24,skv=48,d=32,dtype={dtype},seed={seed}{mask}"
    for dtype in ("float16", "float32")
    for seed, mask in ((1, ""), (2, ",mask=causal"), (3, ",scale=0.7"))
)


def launched(trial: Trial, name: str = "", e: float = 0.0) -> Trial:
    """A kernel of fp32 scores, P rounded to the dtype, and a fault of that class and strength."""
    p = trial.problem
    q, k, v = (x.float() for x in trial.expanded)
    scores = q @ k.mT * p.scale * (1 + e * (name == "scale"))
    seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
    scores = scores.masked_fill(~seen, -math.inf)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp((scores - top) * (1 + e * (name == "exponent")))
    if name == "lse":
        weights = weights * math.exp(e)
    if name == "key":
        weights = without_one(weights, e)
    total = weights.sum(-1, keepdim=True)
    rounded = weights.to(p.format.torch).float()
    out = rounded @ v / total
    out = out * (1 + e * (name == "out"))
    out = out.to(p.format_out.torch)
    lse = (top + total.log())[..., 0]
    trial.launches["first"] = Launch(OK, "nan", {"out": out, "lse": lse})
    return trial


def without_one(weights: Tensor, most: float) -> Tensor:
    """Each row without the heaviest of its keys whose weight is at most so large."""
    share = weights / weights.sum(-1, keepdim=True)
    share = share.masked_fill(share > most, -1.0)
    at = share.argmax(-1, keepdim=True)
    return weights.scatter(-1, at, weights.gather(-1, at) * (share.gather(-1, at) < 0))


def ruling(case: str, name: str = "", e: float = 0.0) -> Ruling:
    return bound.judge(launched(trial_of(Problem.parse(case)), name, e))


@cache
def honest(case: str) -> Ruling:
    return ruling(case)


def certificate(name: str, dtype: str) -> tuple[float, str]:
    """The smallest strength of the honest kernel's cases, and the case."""
    cases = [case for case in CASES if f"dtype={dtype}" in case]
    return min((honest(case).measures[f"power_{name}"], case) for case in cases)


def check(name: str, dtype: str) -> None:
    """That either sign of 1.3 times the certificate fails in the named case."""
    strength, case = certificate(name, dtype)
    for sign in (1, -1) if name != "key" else (1,):
        assert ruling(case, name, sign * 1.3 * strength).finding is not None, (name, sign, strength)


@pytest.mark.parametrize("case", CASES)
def test_an_honest_kernel_passes_and_has_every_certificate(case: str) -> None:
    found = honest(case)
    assert found.finding is None
    assert {f"power_{name}" for name in CLASSES} <= found.measures.keys()
    assert all(0 < found.measures[f"power_{name}"] < 1 for name in CLASSES)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", [name for name in CLASSES if name != "element"])
def test_a_fault_beyond_the_certificate_fails_in_the_named_case(name: str, dtype: str) -> None:
    check(name, dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_whichever_element_is_off_by_more_than_the_certificate_fails(dtype: str) -> None:
    strength, case = certificate("element", dtype)
    honest_out = launched(trial_of(Problem.parse(case))).first.out
    assert honest_out is not None
    size = honest_out.double().square().mean(-1, keepdim=True).sqrt().expand(honest_out.shape)
    for at in range(0, honest_out.numel(), honest_out.numel() // 24 + 1):
        trial = launched(trial_of(Problem.parse(case)))
        assert trial.first.out is not None
        flat = trial.first.out.view(-1)
        flat[at] = flat[at].double() + 1.3 * strength * size.flatten()[at]
        assert bound.judge(trial).finding is not None


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "element"])
def test_a_certificate_that_is_too_good_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check above fails where the closed form promises a tenth of what is true."""
    for form in ("_smallest", "_lightest"):
        right: Callable[..., float] = getattr(power, form)
        monkeypatch.setattr(power, form, lambda *given, right=right: right(*given) / 10)
    honest.cache_clear()
    try:
        with pytest.raises(AssertionError, match=name):
            check(name, "float16")
    finally:
        honest.cache_clear()


def test_a_case_that_fails_certifies_nothing() -> None:
    found = ruling(CASES[0], "out", 0.1)
    assert found.finding is not None
    assert not [name for name in found.measures if name.startswith("power_")]


@pytest.mark.parametrize(("shift", "sign"), [(6.0, 1), (-6.0, -1)])
def test_the_lse_moves_with_the_scale_at_least_as_far_as_said(shift: float, sign: int) -> None:
    """Of rows of scores around `shift`; the response says the direction too."""
    scores = (
        torch.randn(500, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        * torch.linspace(0, 2, 500, dtype=torch.float64)[:, None]
    )
    scores += shift
    lse = scores.logsumexp(-1)
    least = power._least_response(lse, torch.tensor(12.0, dtype=torch.float64))
    assert bool((least * sign >= 0).all())
    assert float((least != 0).double().mean()) > 0.9
    said = least != 0  # of other rows not even the direction is said
    for e in (1e-4, 0.1, 1.0, -1e-4, -0.1, -1.0):
        moved = ((scores * (1 + e)).logsumexp(-1) - lse)[said] * math.copysign(1, e) * sign
        assert bool((moved >= abs(e) * least[said].abs() - 1e-12).all())
    assert float(power._least_response(torch.tensor(1.0), torch.tensor(9.0))) == 0


GRADIENTS = "b=1,hq=2,hkv=2,sq=24,skv=40,d=32,dtype=float16,seed=3"


def backward(factors: dict[str, float]) -> Ruling:
    """The ruling on an emulated backward whose gradients are multiplied so."""
    case = Problem.parse(GRADIENTS)
    saved, found = emulate(case, HALF)
    trial = trial_of(
        case,
        gradients=HALF.numerics,
        numerics=HALF.forward.numerics,
        entries=("forward", "backward"),
    )
    trial = replace(trial, arch=HALF.arch, entry="backward")
    trial.launches["saved"] = Launch(OK, "nan", {"out": saved.out, "lse": saved.lse})
    given = {
        name: (x.double() * factors.get(name, 1.0)).to(x.dtype) for name, x in dict(found).items()
    }
    trial.launches["first"] = Launch(OK, "nan", given)
    return bound.judge_backward(trial)


@pytest.mark.parametrize("name", ["dq", "dk", "dv", "read_lse"])
@pytest.mark.parametrize("sign", [1, -1])
def test_gradients_beyond_the_certificate_fail(name: str, sign: int) -> None:
    right = backward({})
    assert right.finding is None
    e = sign * 1.3 * right.measures[f"power_{name}"]
    assert 0 < abs(e) < 0.1
    every = dict.fromkeys(("dq", "dk", "dv"), math.exp(-e))
    assert backward(every if name == "read_lse" else {name: 1 + e}).finding is not None
