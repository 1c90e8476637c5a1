"""Honest kernels whose arithmetic overflows, and what an oracle may ask of them: infinities, NaN,
rows outside the domain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from references.masks import Causal
from tests.harness.fake_trials import PLAIN, acquitted, convicted, tried
from tests.harness.in_process import Kernel, declared
from tests.harness.in_process import trial as asked
from tests.harness.reference_kernel import LOG2_E, Hand, tried_by
from verify.arithmetic.dtypes import dtype_named
from verify.cell.arena import bits, different
from verify.judging.comparison import compare
from verify.judging.findings import first, place
from verify.judging.metamorphic import beyond_arithmetic, check_same_bits
from verify.judging.trial import Trial
from verify.oracles import (
    bound,
    causality,
    poison,
    power_of_two,
    repeat,
)
from verify.problem import Problem
from verify.variant import Contract, Numerics

torch.set_num_threads(1)

INF, NAN = math.inf, math.nan
SHAPE = {
    "batch": 2,
    "heads_q": 4,
    "heads_kv": 2,
    "seqlen_q": 24,
    "seqlen_kv": 24,
    "head_dim": 32,
    "dtype": "float16",
}


@pytest.mark.parametrize(
    ("got", "want", "bound", "right"),
    [
        (INF, 65000.0, 600.0, True),
        (INF, 65000.0, 500.0, False),
        (-INF, 65000.0, 600.0, False),
        (-INF, 1.0, 1e5, True),
        (INF, -1.0, 1e5, True),
        (-INF, 0.0, 65520.0, True),
        (-INF, 1.0, 65520.0, False),
        (NAN, 1.0, 1e5, False),
        (NAN, 1.0, INF, True),
    ],
)
def test_an_infinity_is_right_on_the_side_where_the_bound_reaches_past_overflow(
    got: float, want: float, bound: float, right: bool
) -> None:
    """Of sums that cancel the sign may be lost, too."""
    tensors = (torch.tensor([x], dtype=torch.float64) for x in (want, bound))
    compared = compare(torch.tensor([got], dtype=torch.float16), *tensors, dtype_named("float16"))
    assert (compared.worst <= 1) is right


# Bits: IEEE 754 leaves a NaN's sign and payload open, and CPUs give one or another by the place in
# a vector.


def another_nan(dtype: torch.dtype) -> Tensor:
    """The negative of the usual one, with a payload."""
    return (
        -bits(torch.tensor([1.0], dtype=dtype)) | bits(torch.tensor([NAN], dtype=dtype)) | 1
    ).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_nan_is_like_any_other(dtype: torch.dtype) -> None:
    one, other = (
        torch.tensor([NAN, NAN, 1.0, 0.0], dtype=dtype),
        torch.tensor([0.0, NAN, 1.0, -0.0], dtype=dtype),
    )
    other[0] = another_nan(dtype)[0]
    assert bits(one)[0] != bits(other)[0]
    assert different(one, other).tolist() == [False, False, False, True]
    assert acquitted(check_same_bits("slice", "alone", [("out", one, other)]))
    convicted(
        check_same_bits("slice", "alone", [("out", one, other.nan_to_num(2.0))]), "2 of 4 elements"
    )


def test_runs_that_differ_in_kinds_of_nan_repeat() -> None:
    def again(value: Tensor) -> Trial:
        trial = tried(PLAIN.but(dtype="float16"), lambda out, lse: out[0, 0, 0, :2].fill_(NAN))
        out = trial.first.outputs["out"].clone()
        out[0, 0, 0, 1] = value[0]
        trial.launches["again"] = replace(trial.first, outputs=trial.first.outputs | {"out": out})
        return trial

    assert acquitted(repeat.ORACLES[0].judge(again(another_nan(torch.float16))))
    convicted(repeat.ORACLES[0].judge(again(torch.tensor([1.0]))), "out[b=0, h=0, q=0, d=1]")


# Backward: a saved O or LSE that is not finite makes NaN at masked pairs, where P is 0 and S is
# -inf.

OVERFLOWING = Problem(**SHAPE, seed=3, distribution="large_logits", mask=Causal())
HALF_SCORES = Numerics(scores="input", exp="exp2f")


@dataclass(frozen=True)
class Unguarded(Hand):
    """Scores in fp16, and a backward that masks S alone.  plant: what becomes of its gradients."""

    plant: tuple[str, tuple[int, ...], float] | None = None

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT).half().float()

    def backward(self, p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        q, k, v = self._loaded(p, given)
        seen, dtype, dout = (
            p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv),
            p.format.torch,
            given["dout"].float(),
        )
        scores = (q @ k.mT * (p.scale * LOG2_E)).masked_fill(~seen, -INF)
        weights = torch.exp2(scores - (given["lse"] * LOG2_E)[..., None])
        delta = (dout * given["out"].float()).sum(-1, keepdim=True)
        ds = (weights * (dout @ v.mT - delta)).to(dtype).float()
        by_head = p.batch, p.heads_kv, p.group, p.seqlen_kv
        dk, dv = ds.mT @ q * p.scale, weights.to(dtype).float().mT @ dout
        dk, dv = (x.view(*by_head, x.shape[-1]).sum(2) for x in (dk, dv))
        found = {"dq": (ds @ k * p.scale).to(dtype), "dk": dk.to(dtype), "dv": dv.to(dtype)}
        if self.plant is not None:
            name, at, value = self.plant
            found[name][at] = value
        return found


def backward(plant: tuple[str, tuple[int, ...], float] | None = None, **changes: object) -> Trial:
    return tried_by(
        Unguarded(plant=plant), OVERFLOWING.but(**changes), "backward", numerics=HALF_SCORES
    )


def test_a_saved_result_that_is_not_finite_may_spread_to_hidden_keys() -> None:
    hidden = 0
    for seed in range(6):
        trial = backward(seed=seed)
        assert bool((~trial.saved.outputs["out"].isfinite()).any())
        for oracle in (bound.BACKWARD, causality.BACKWARD):
            assert acquitted(oracle.judge(trial))
        # the only row that sees that key
        last = trial.saved.outputs["lse"][:, :, -1].isfinite().unflatten(1, (2, 2)).all(2)
        hidden += int((trial.first.outputs["dk"][:, :, -1].isnan().any(-1) & last).sum())
    assert hidden


@pytest.mark.parametrize(("name", "value"), [("dq", NAN), ("dk", NAN), ("dv", 1e4)])
def test_what_no_such_row_reaches_is_asked_all_the_same(name: str, value: float) -> None:
    few = {"batch": 8, "seqlen_q": 2, "seqlen_kv": 2}
    planted = 0
    for seed in range(4):
        asked_for = getattr(backward(seed=seed, **few).gradients, f"{name}_bound").isfinite()
        assert not bool(asked_for.all())
        if bool(asked_for.any()):
            at = first(asked_for)
            convicted(
                bound.judge_backward(backward((name, at, value), seed=seed, **few)), place(name, at)
            )
            planted += 1
    assert planted


@pytest.mark.parametrize("value", [NAN, 1.0])
def test_finite_rows_spread_nothing(value: float) -> None:
    """Key 23 is hidden from all rows but the last."""
    for name in ("dk", "dv"):
        trial = backward((name, (0, 0, 23, 0), value), distribution="normal")
        assert bool(trial.saved.outputs["out"].isfinite().all())
        convicted(bound.judge_backward(trial), f"{name}[b=0, h=0, k=23, d=0]")


# Rows whose scores the declared arithmetic does not hold: a finite stand-in for masked scores
# outweighs -inf.

EAGER = Numerics(scores="input", normalised=True, exp="vexp", block_n=0)


@dataclass(frozen=True)
class Eager:
    """softmax(round(round(Q K^T) scale) + mask) V.  hidden: what masked scores become; added: it is
    added to them, instead."""

    hidden: float = -65504.0
    added: bool = False
    product: torch.dtype = torch.float32
    flush: float = 0.0

    def __call__(self, p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        q, k, v = (given[name].expand(getattr(p, f"shape_{name}")).float() for name in "qkv")
        k, v = (x.repeat_interleave(p.group, 1) for x in (k, v))
        masked, dtype = ~p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv), p.format.torch
        s = ((q @ k.mT).to(dtype).float() * p.scale).to(dtype)
        s = (
            s + masked.to(dtype).masked_fill(masked, self.hidden)
            if self.added
            else s.masked_fill(masked, self.hidden)
        )
        weights = torch.exp(s.float() - s.float().amax(-1, keepdim=True))
        if self.product != torch.float32:  # un-normalised sums of 16 keys, stored in 16 bits
            parts = zip(weights.to(dtype).float().split(16, -1), v.split(16, 2), strict=True)
            out = sum((w @ x).to(self.product).float() for w, x in parts) / weights.sum(
                -1, keepdim=True
            )
        else:
            out = (weights / weights.sum(-1, keepdim=True)).to(dtype).float() @ v
        return {
            "out": torch.where(out.abs() < self.flush, 0.0, out).to(dtype),
            "lse": torch.zeros(p.shape_q[:3]),
        }


def eager(kernel: Eager, problem: Problem, **changes: object) -> Trial:
    declaration = replace(declared(Contract(lse=None, nan="any"), EAGER, softcap=False), **changes)
    return asked(kernel, problem, declaration)


@pytest.mark.parametrize("oracle", [causality.FORWARD, poison.ORACLE], ids=["causality", "poison"])
def test_hidden_keys_may_show_in_rows_whose_scores_overflow(oracle) -> None:
    below = Problem(**(SHAPE | {"head_dim": 128}), distribution="below_sentinel", mask=Causal())
    for seed in range(4):
        trial = eager(Eager(), below.but(seed=seed))
        assert bool(beyond_arithmetic(trial).any())
        assert acquitted(oracle.judge(trial))
        ordinary = below.but(seed=seed, distribution="normal")
        assert acquitted(oracle.judge(eager(Eager(), ordinary)))
        assert not bool(beyond_arithmetic(eager(Eager(), ordinary)).any())
        convicted(oracle.judge(eager(Eager(hidden=-4.0), ordinary)), "out[b=0")


def test_an_infinite_score_makes_no_zero_of_a_column_of_zeros() -> None:
    """inf - inf is NaN, and so is its product with 0; where scores are finite the column stays
    exactly 0."""
    zeros = 0
    for seed in range(6):
        case = Problem(
            **(SHAPE | {"seqlen_kv": 2}),
            distribution="small_integers",
            softmax_scale=1e5,
            seed=seed,
        )
        trial = eager(Eager(), case)
        beyond, column = (
            beyond_arithmetic(trial),
            (trial.truth.out_bound == 0) & (trial.truth.out == 0),
        )
        assert not bool(column[beyond].any())
        zeros += int((~beyond[..., None] & column).sum())
        assert acquitted(bound.judge(trial))
        assert bool(trial.first.outputs["out"].isnan().any())
        at = first(~beyond[..., None] & column)
        trial.first.outputs["out"][at] = 1e-7
        convicted(bound.judge(trial), place("out", at))
    assert zeros


def test_a_key_that_must_not_show_is_no_larger_than_fp16_scores_hold() -> None:
    """+inf + -inf is NaN, and infinities may spread from a masked place."""
    for distribution in ("normal", "increasing"):
        for seed in range(4):
            case = Problem(
                **(SHAPE | {"head_dim": 128}), distribution=distribution, mask=Causal(), seed=seed
            )
            assert acquitted(poison.judge(eager(Eager(hidden=-INF, added=True), case)))
    case = Problem(**SHAPE, mask=Causal(), seed=1)
    convicted(poison.judge(eager(Eager(hidden=-30.0, added=True), case)), "huge values")
    assert float(poison.poisoned(eager(Eager(), case)).inputs.k.abs().max()) < 2.0**14
    wide = asked(Kernel(), case, declared(softcap=False))
    assert float(poison.poisoned(wide).inputs.k.abs().max()) == 2.0**14, "scores in fp32"


def test_sums_of_an_undeclared_function_may_be_rounded_in_fp16() -> None:
    """A part of a sum may be subnormal where the whole is a normal number, so that bits do not
    scale."""
    cases = [
        Problem(**(SHAPE | {"seqlen_q": 1, "seqlen_kv": 111}), distribution="octaves", seed=seed)
        for seed in range(2, 40, 2)
    ]
    kernel = Eager(product=torch.float16)
    trials = [eager(kernel, case, undeclared=True) for case in cases]
    down = [
        t for t in trials if power_of_two.FORWARD.concerns(t) and power_of_two.powers(t).values < 0
    ]
    assert all(acquitted(power_of_two.judge(trial)) for trial in down)
    assert not all(acquitted(power_of_two.judge(eager(kernel, trial.problem))) for trial in down), (
        "declared fp32"
    )
    flushed = [eager(replace(kernel, flush=1e-3), trial.problem, undeclared=True) for trial in down]
    assert not any(acquitted(power_of_two.judge(trial)) for trial in flushed)
