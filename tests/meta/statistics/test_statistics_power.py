"""Predicted errors on trial: emulated honest kernels err as much as predicted, and kernels that err
otherwise are found out.

Every fault here stays within the hard bound of every element, or nearly so: that is what statistics
are for.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.harness import emulation, emulation_backward
from tests.harness.emulated_campaigns import (
    BACKWARD,
    EAGER,
    EIGHT,
    HALVES,
    HONEST,
    HONEST_BACKWARDS,
    ONLINE,
    SHAPES,
    SQUARE,
    Change,
    backwards,
    campaign_of,
    forward_of,
    forwards,
    problems,
)
from tests.harness.emulation import Kernel, Luck
from tests.harness.emulation_backward import BackwardKernel
from verify.statistics import forward, gradients
from verify.statistics.rows import Prediction, chosen
from verify.tolerance.forward import resolve
from verify.tolerance.gradients_arithmetic import resolve as resolve_gradients
from verify.variant import Config

PAIRS = [(kernel, "bfloat16") for kernel in HONEST] + [(kernel, "float16") for kernel in HONEST[:3]]
BACKWARD_PAIRS = [(kernel, "bfloat16") for kernel in HONEST_BACKWARDS] + [(BACKWARD, "float16")]
# Honest kernels


@pytest.mark.first_look(3)
@pytest.mark.parametrize(
    ("kernel", "dtype"), PAIRS, ids=lambda value: value if isinstance(value, str) else value.name
)
def test_honest_forwards_err_as_predicted(kernel: Kernel, dtype: str) -> None:
    found = forwards(kernel, problems(dtype, SHAPES, 1))
    out = found.pools["out"]
    assert found.failing() == set()
    assert not out.too_good
    assert out.rows > 300
    # Nearly all that is allowed is used: what a kernel errs beyond it is seen.  Where neither the
    # place of P's last digit nor the correlation of what a prescale loses is known, a part is
    # spare.
    assert 0.7 < out.rms < 1.02
    assert out.slack < 0.1
    assert abs(out.mean) < 0.15
    assert found.pools["lse"].rms < 1


@pytest.mark.first_look(2)
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    BACKWARD_PAIRS,
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_honest_backwards_err_as_predicted(kernel: BackwardKernel, dtype: str) -> None:
    found = backwards(kernel, problems(dtype, SQUARE, 1))
    assert found.failing() == set()
    for pool in found.pools.values():
        assert 0.9 < pool.rms < 1.03
        assert pool.slack < 0.1
        assert abs(pool.mean) < 0.15
        assert not pool.too_good


def test_eight_bits_err_no_more_than_predicted() -> None:
    found = forwards(EIGHT, problems("float8_e4m3fn", SHAPES, 1))
    assert found.failing() == set()
    assert 0.2 < found.pools["out"].rms < 1.02


def test_bad_luck_is_no_fault() -> None:
    """Transcendental functions and divisions that err as much as they may, in the directions that
    add up in a column."""
    asked = problems("float16", SHAPES, 1)[:3]
    cases = [dict(forward_of(ONLINE, problem, ONLINE)) for problem in asked]
    for problem, case in zip(asked, cases, strict=True):
        rows = chosen(problem.seqlen_q, problem.batch * problem.heads_q, 1.0, problem.seed)
        result = emulation.emulate(problem, ONLINE, Luck.AGAINST)
        case["out"] = replace(case["out"], got=result.out.flatten(0, 1)[:, rows].double())
        case["lse"] = replace(case["lse"], got=result.lse.flatten(0, 1)[:, rows, None])
    assert campaign_of(asked, cases, None).failing() == set()


@pytest.mark.parametrize(
    "changes",
    [
        {"row_sum_of": "rounded"},
        {"exp": "ex2.approx.f16"},
        {"accumulator": "float16"},
        {"rescale_exp": "__expf"},
    ],
    ids=lambda changes: "-".join(changes.values()),
)
def test_forwards_that_are_not_derived_are_not_judged(changes: dict[str, str]) -> None:
    """Such kernels err more than predicted, and rightly so."""
    problem = problems("float16", SHAPES, 1)[0]
    assert (
        forward.underived(resolve(ONLINE.but(**changes).numerics, Config(), problem, ONLINE.arch))
        is not None
    )
    assert forward.underived(resolve(ONLINE.numerics, Config(), problem, ONLINE.arch)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"delta": "input"},
        {"exp": "ex2.approx.f16"},
        {"prescale": "k"},
        {"atomics": ("dq",), "atomics_dtype": "input"},
    ],
    ids="-".join,
)
def test_backwards_that_are_not_derived_are_not_judged(changes: dict[str, object]) -> None:
    problem = problems("float16", SQUARE, 1)[0]
    for kernel, judged in ((BACKWARD.but(**changes), False), (BACKWARD, True)):
        arithmetic = resolve_gradients(kernel.numerics, Config(), problem, kernel.arch)
        assert (gradients.underived(arithmetic) is None) == judged


# Faults within the bounds


def scaled(factor: float) -> Change:
    return lambda got, exact, predicted: exact + factor * (got - exact)


def biased(sigmas: float) -> Change:
    return lambda got, exact, predicted: got + sigmas * predicted.sigma


def truncated(dtype: str) -> Change:
    """The exact result, cast toward zero."""
    bits = {"float16": 13, "bfloat16": 16}[dtype]
    return lambda got, exact, predicted: (
        (exact.float().view(torch.int32) & -(1 << bits)).view(torch.float32).double()
    )


def cut(x: Tensor, dtype: str) -> Tensor:
    bits = {"float16": 13, "bfloat16": 16}[dtype]
    return (x.contiguous().view(torch.int32) & -(1 << bits)).view(torch.float32)


class _CutsP(emulation.Emulation):
    def rounded(self, p: Tensor) -> Tensor:
        return cut(p, self.problem.dtype)


class _CutsPairs(emulation_backward.Backward):
    def round(self, x: Tensor, kind: str) -> Tensor:
        return cut(x, self.problem.dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("fault", "tests"),
    [
        ("errors 1.5 times as large", {"rms"}),
        ("a bias of 0.35 sigma", {"mean", "toward"}),
        ("O truncated", {"mean", "toward"}),
    ],
)
def test_wrong_results_within_the_bound(fault: str, tests: set[str], dtype: str) -> None:
    change = {"errors": scaled(1.5), "a bias": biased(0.35), "O": truncated(dtype)}
    found = forwards(
        ONLINE,
        problems(dtype, SHAPES),
        change=next(f for name, f in change.items() if fault.startswith(name)),
    )
    assert found.r < 1
    assert {name for name, _, _ in found.pools["out"].excesses} & tests


@pytest.mark.parametrize("dtype", HALVES)
def test_truncated_p_is_within_the_bound_and_found(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulation, "Emulation", _CutsP)
    found = forwards(ONLINE.but(name="cuts P"), problems(dtype, SHAPES))
    assert found.r < 1
    assert "toward" in {name for name, _, _ in found.pools["out"].excesses}
    assert found.pools["out"].toward < -0.5


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        ("float16", {"probability": "bfloat16"}),
        ("float16", {"probability": "float8_e4m3fn"}),
        ("bfloat16", {"probability": "float8_e4m3fn"}),
        ("float16", {"fault": "fp16 accumulation"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.values()),
)
def test_false_claims_are_found(dtype: str, changes: dict[str, str]) -> None:
    found = forwards(ONLINE.but(**changes), problems(dtype, SHAPES, 1), ONLINE)
    assert "rms" in {name for name, _, _ in found.pools["out"].excesses}


@pytest.mark.parametrize("dtype", HALVES)
def test_a_row_sum_of_rounded_p_shows_in_lse(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sums(emulation.Emulation):
        def add_up(self, p: Tensor, start: Tensor) -> Tensor:
            return super().add_up(self.rounded(p), start)

    monkeypatch.setattr(emulation, "Emulation", Sums)
    found = forwards(ONLINE.but(name="sums rounded P"), problems(dtype, SHAPES, 1))
    assert found.failing() == {"lse"}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("change", "test"),
    [(scaled(1.5), "rms"), (biased(0.35), "mean")],
    ids=["1.5 times as large", "a bias of 0.35 sigma"],
)
def test_wrong_gradients_within_the_bound(change: Change, test: str, dtype: str) -> None:
    found = backwards(BACKWARD, problems(dtype, SQUARE), change=change)
    for pool in found.pools.values():
        assert test in {name for name, _, _ in pool.excesses}


@pytest.mark.first_look(2)
@pytest.mark.parametrize("dtype", ["bfloat16"])
@pytest.mark.parametrize(
    ("claim", "fault", "tensors"),
    [
        ({"delta": "float32"}, {"delta": "input"}, {"dq", "dk"}),
        ({}, {"fault": "scale off by 1e-3"}, {"dq", "dk", "dv"}),
        ({"score_gradient_dtype": "float32"}, {"score_gradient_dtype": "input"}, {"dq", "dk"}),
        ({"probability": "float32"}, {"probability": "input"}, {"dv"}),
    ],
    ids=["delta rounded", "scale", "dS rounded", "P rounded"],
)
def test_wrong_backwards_are_found(
    claim: dict[str, str], fault: dict[str, str], tensors: set[str], dtype: str
) -> None:
    found = backwards(
        BACKWARD.but(**(claim | fault)), problems(dtype, SQUARE), BACKWARD.but(**claim)
    )
    assert found.failing() == tensors


def test_truncated_pairs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation_backward, "Backward", _CutsPairs)
    found = backwards(BACKWARD.but(name="cuts P and dS"), problems("bfloat16", SQUARE))
    assert all("toward" in {name for name, _, _ in pool.excesses} for pool in found.pools.values())


# Too good


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_fp32_where_rounding_is_declared_is_noted(dtype: str) -> None:
    """dV with P in fp32, and dQ and dK of an unrounded dS, or of the reference: within every limit,
    but not as declared."""
    for found in (
        backwards(
            BACKWARD.but(probability="float32", score_gradient_dtype="float32"),
            problems(dtype, SQUARE, 3),
            BACKWARD,
        ),
        backwards(
            BACKWARD,
            problems(dtype, SQUARE, 3),
            change=lambda got, exact, _: exact.to(getattr(torch, dtype)).double(),
        ),
    ):
        assert found.failing() == set()
        assert all(pool.too_good for pool in found.pools.values())


def test_honest_rows_are_not_too_good_and_the_reference_is() -> None:
    """O needs more rows than this: of the least that roundings give, P's part is small."""
    found = forwards(
        EAGER, problems("bfloat16", SHAPES), change=lambda got, exact, _: exact.bfloat16().double()
    ).pools["out"]
    assert (
        found.least
        < 1 - found.share / 2
        < forwards(EAGER, problems("bfloat16", SHAPES)).pools["out"].least
    )
    assert replace(found, rows=10**6).too_good


def noisier(e: float, dtype: str) -> Change:
    """A further error of what is rounded on the way, e times as large as theirs."""
    generator = torch.Generator().manual_seed(11)

    def change(got: Tensor, exact: Tensor, predicted: Prediction) -> Tensor:
        size = (predicted.least * predicted.share).sqrt()
        draw = torch.randn(got.shape, generator=generator, dtype=torch.float64)
        return (got + e * size * draw).to(getattr(torch, dtype)).double()

    return change


@pytest.mark.parametrize("dtype", HALVES)
def test_noise_beyond_the_certificate_fails(dtype: str) -> None:
    """1.3 times the certificate fails; what P's own roundings leave to a third of it does not."""
    asked = problems(dtype, SHAPES, 2)
    pool = forwards(ONLINE, asked).pools["out"]
    assert 0.3 < pool.noise < 5
    for factor, fails in ((1.3, True), (0.33, False)):
        change = noisier(factor * pool.noise, dtype)
        found = forwards(ONLINE, asked, change=change).pools["out"]
        assert ("rms" in {name for name, *_ in found.excesses}) == fails, factor


def test_noise_in_ds_beyond_the_certificate_fails() -> None:
    asked = problems("bfloat16", SQUARE, 1)
    pool = backwards(BACKWARD, asked).pools["dq"]
    assert 0.3 < pool.noise < 5
    found = backwards(BACKWARD, asked, change=noisier(1.3 * pool.noise, "bfloat16"))
    assert "rms" in {name for name, *_ in found.pools["dq"].excesses}
