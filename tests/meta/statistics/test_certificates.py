"""Certificates: a fault of 1.3 times the certified strength fails in the case that certifies it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.emulation_backward import emulate
from tests.harness.fake_trials import OK, trial_of
from tests.harness.honest_backwards import HALF
from tests.harness.reference_kernel import Hand, faulty, tried_by
from tests.properties import tier
from verify.judging.findings import Ruling
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.oracles import bound
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.statistics import power
from verify.variant import Contract

pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES = ("scale", "exponent", "lse", "key", "out", "element")
CASES = tuple(
    f"b=1,hq=2,hkv=2,sq=24,skv=48,d=32,dtype={dtype},seed={seed}{mask}"
    for dtype in ("float16", "float32")
    for seed, mask in ((1, ""), (2, ",mask=causal"), (3, ",scale=0.7"))
)


def launched(trial: Trial, name: str = "", e: float = 0.0, lse: bool = True) -> Trial:
    """A kernel of fp32 scores, P rounded to the dtype, and a fault of that class and strength; lse:
    whether it saves one."""
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
    saved = {"lse": (top + total.log())[..., 0]} if lse else {}
    trial.launches["first"] = Launch(OK, "nan", {"out": out} | saved)
    return trial


def without_one(weights: Tensor, most: float) -> Tensor:
    """Each row without the heaviest of its keys whose weight is at most so large."""
    share = weights / weights.sum(-1, keepdim=True)
    share = share.masked_fill(share > most, -1.0)
    at = share.argmax(-1, keepdim=True)
    return weights.scatter(-1, at, weights.gather(-1, at) * (share.gather(-1, at) < 0))


def ruling(case: str, name: str = "", e: float = 0.0) -> Ruling:
    return bound.judge(launched(trial_of(Problem.parse(case)), name, e))


def without_lse(case: str, name: str = "", e: float = 0.0) -> Ruling:
    trial = trial_of(Problem.parse(case), Contract(lse=None))
    return bound.judge(launched(trial, name, e, lse=False))


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
@pytest.mark.parametrize("name", ["scale", "key"])
def test_certificates_of_a_kernel_without_lse(name: str, dtype: str) -> None:
    """Every strength from the certificate on fails, of a key too: which one is lost changes."""
    for case in CASES:
        if f"dtype={dtype}" not in case:
            continue
        found = without_lse(case)
        assert found.finding is None
        assert "power_lse" not in found.measures
        strength = found.measures[f"power_{name}"]
        assert 0 < strength < 1
        for factor in (1.3, 1.7, 3.0, 10.0):
            for sign in (1, -1) if name == "scale" else (1,):
                if factor * strength < 1:
                    fault = without_lse(case, name, sign * factor * strength)
                    assert fault.finding is not None, (case, factor)


@pytest.mark.parametrize(
    ("weights", "heard", "least"),
    [
        ([[0.5, 0.3, 0.2]], [[1, 1, 1]], 0.2),
        ([[0.5, 0.3, 0.2]], [[1, 0, 1]], 0.5),  # at 0.4 the silent 0.3 is lost
        ([[0.5, 0.3, 0.2], [0.6, 0.4, 0.0]], [[1, 0, 1], [1, 1, 0]], 0.4),
        ([[0.5, 0.3, 0.2], [0.6, 0.29, 0.11]], [[1, 0, 0], [1, 1, 1]], 0.11),
        ([[0.4, 0.4, 0.2]], [[0, 1, 1]], math.inf),  # either of equal ones may be lost
        ([[0.4, 0.4, 0.2]], [[1, 0, 1]], math.inf),
        ([[0.4, 0.4, 0.2]], [[1, 1, 0]], 0.4),
        ([[0.5, 0.3, 0.2]], [[0, 1, 1]], math.inf),
        ([[0.0, 0.0, 0.0]], [[1, 1, 1]], math.inf),
    ],
)
def test_the_lightest_key_from_which_on_all_are_heard(weights, heard, least: float) -> None:
    found = power.lightest_of_all(torch.tensor(weights).double(), torch.tensor(heard).bool())
    assert found == pytest.approx(least)


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
    for form in ("smallest_of", "_lightest"):
        right: Callable[..., Any] = getattr(power, form)
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


def backward(factors: dict[str, float], changed: Change | None = None) -> Ruling:
    """The ruling on an emulated backward whose gradients are multiplied so, or dQ changed by a
    number that is added."""
    trial = emulated()
    found = trial.launches["first"].outputs
    given = {name: (x.double() * factors.get(name, 1.0)).to(x.dtype) for name, x in found.items()}
    if changed is not None:
        given["dq"] = (found["dq"].double() + changed(trial)).to(found["dq"].dtype)
    trial.launches["first"] = Launch(OK, "nan", given)
    return bound.judge_backward(trial)


def emulated() -> Trial:
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
    trial.launches["first"] = Launch(OK, "nan", dict(found))
    return trial


Change = Callable[[Trial], Tensor]


def parts(trial: Trial) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """P, dS, delta and K of the trial's problem, which has as many heads of keys as of queries."""
    p = trial.problem
    q, k, v = (x.double() for x in trial.expanded)
    weights = torch.softmax(q @ k.mT * p.scale, -1)
    dout, out = trial.dout.double(), trial.truth.out
    delta = (dout * out).sum(-1, keepdim=True)
    return weights, weights * (dout @ v.mT - delta), delta, k


def of_delta(e: float) -> Change:
    """dQ with delta (1 + e)."""

    def change(trial: Trial) -> Tensor:
        weights, _, delta, k = parts(trial)
        return -trial.problem.scale * e * delta * (weights @ k)

    return change


def of_a_pair(e: float) -> Change:
    """dQ without the dS of each row's heaviest pair of weight e at most."""

    def change(trial: Trial) -> Tensor:
        weights, ds, _, k = parts(trial)
        at = weights.masked_fill(weights > e, -1.0).argmax(-1, keepdim=True)
        lost = torch.zeros_like(ds).scatter(-1, at, ds.gather(-1, at))
        lost = lost * (weights.gather(-1, at) <= e)
        return -trial.problem.scale * (lost @ k)

    return change


@pytest.mark.parametrize("name", ["dq", "dk", "dv", "read_lse"])
@pytest.mark.parametrize("sign", [1, -1])
def test_gradients_beyond_the_certificate_fail(name: str, sign: int) -> None:
    right = backward({})
    assert right.finding is None
    e = sign * 1.3 * right.measures[f"power_{name}"]
    assert 0 < abs(e) < 0.1
    every = dict.fromkeys(("dq", "dk", "dv"), math.exp(-e))
    assert backward(every if name == "read_lse" else {name: 1 + e}).finding is not None


@pytest.mark.parametrize("factor", [1.3, -1.3, 5.0])
def test_a_wrong_delta_fails(factor: float) -> None:
    e = factor * backward({}).measures["power_delta"]
    assert 0 < abs(e) < 0.5
    assert by_bound(of_delta(e))


@pytest.mark.parametrize("factor", [1.3, 1.7, 3.0])
def test_a_lost_pair_fails(factor: float) -> None:
    e = factor * backward({}).measures["power_ds_pair"]
    assert 0 < e < 0.5
    assert by_bound(of_a_pair(e))


def by_bound(changed: Change) -> bool:
    """Whether the element bound alone convicts it: known roundings see much less."""
    finding = backward({}, changed).finding
    return finding is not None and "is off by" in finding.message


@pytest.mark.parametrize("change", [of_delta, of_a_pair])
def test_certificates_of_pairs_that_are_too_good_are_noticed(
    change: Callable[[float], Change], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A twentieth of the true strength is within the bound."""
    name = "power_delta" if change is of_delta else "power_ds_pair"
    assert not by_bound(change(backward({}).measures[name] / 20))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("distribution", tier.thorough(ordinary(), keep=3))
def test_certificates_of_pairs_hold_in_every_distribution(distribution: str, dtype: str) -> None:
    """With FlashAttention-2's backward, and faults up to twenty times as large."""
    case = Problem.parse(f"hq=2,hkv=2,sq=48,skv=80,d=64,dtype={dtype},seed=5")
    case = case.but(distribution=distribution)
    right = tried_by(Hand(), case, "backward")
    measures = bound.judge_backward(right).measures
    weights, *_ = parts(right)
    for factor in (1.3, 5.0, 20.0, -1.3):
        e = factor * measures.get("power_delta", 1.0)
        if abs(e) <= 1:
            assert fails(faulty(delta=lambda delta, e=e: delta * (1 + e)), case), factor
        e = factor * measures.get("power_ds_pair", 1.0)
        if 0 < e <= 1:
            at = weights.masked_fill(weights > e, -1.0).argmax(-1, keepdim=True)
            kept = torch.ones_like(weights).scatter(-1, at, (weights.gather(-1, at) > e).double())
            kept = kept.float()
            assert fails(faulty(dscores=lambda ds, kept=kept: ds * kept), case), factor


def fails(kernel: Hand, case: Problem) -> bool:
    """Whether the element bound convicts it."""
    finding = bound.judge_backward(tried_by(kernel, case, "backward")).finding
    return finding is not None and "is off by" in finding.message
