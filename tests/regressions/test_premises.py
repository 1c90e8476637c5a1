"""Honest kernels that once broke an oracle's premise, and faults that once hid behind what was
never asked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from references.masks import Causal, Window
from tests.harness.emulation import Kernel, Luck, emulate
from tests.harness.fake_trials import OK, acquitted, convicted, right_run, trial_of, tried
from tests.harness.in_process import SUPPORT, declared
from tests.harness.in_process import Kernel as Direct
from tests.harness.in_process import trial as asked
from tests.harness.reference_kernel import Hand, faulty, tried_by
from verify.judging.findings import Ruling
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.oracles import (
    Oracle,
    bound,
    causality,
    counting,
    gather,
    integer_scores,
    poison,
    power_of_two,
)
from verify.oracles.contract import oracle as contract
from verify.problem import Problem
from verify.problem.known_answers import gather_targets
from verify.variant import Contract, GradientNumerics, Numerics

torch.set_num_threads(1)

LOG2_E = math.log2(math.e)
SHAPE = {
    "batch": 2,
    "heads_q": 4,
    "heads_kv": 2,
    "seqlen_q": 24,
    "seqlen_kv": 70,
    "head_dim": 32,
    "dtype": "float16",
}

# Integer scores: Q K^T is exact unless Q was multiplied by something that is no power of two.

INTEGERS = Problem(**SHAPE, seed=5, distribution="integer_scores")
BASE_2, BASE_E = ("ex2.approx", "exp2f", "exp2_poly3"), ("expf", "vexp", "fexp_u20")


@pytest.mark.parametrize("exp", [*BASE_2, *BASE_E])
def test_scores_are_exact_where_operands_are_multiplied_by_a_power_of_two(exp: str) -> None:
    powers_of_2_and_4 = {
        0.25: (True, True),
        -0.25: (True, True),
        0.125: (True, False),
        0.3: (False, False),
    }
    for scale, powers in powers_of_2_and_4.items():
        for prescale, exact in (("none", True), *zip(("q", "sqrt"), powers, strict=True)):
            trial = trial_of(
                INTEGERS.but(softmax_scale=scale), numerics=Numerics(prescale=prescale, exp=exp)
            )
            assert integer_scores.ORACLE.concerns(trial) is (
                exact and (prescale == "none" or exp in BASE_E)
            )


def folded(name: str, x: Tensor) -> Tensor:
    """Q times scale * log2 e, rounded to bf16; divided again, since `Hand` multiplies the
    scores."""
    factor = 0.25 * LOG2_E
    return (x * factor).bfloat16().float() / factor if name == "q" else x


def test_log2_e_in_q_is_honest_and_leaves_no_exact_scores() -> None:
    case, numerics = (
        INTEGERS.but(softmax_scale=0.25, dtype="bfloat16"),
        Numerics(prescale="q", scale_roundings=3),
    )
    trial = tried_by(faulty(load=folded), case, numerics=numerics)
    assert acquitted(bound.judge(trial))
    assert not integer_scores.ORACLE.concerns(trial)
    convicted(integer_scores.judge(trial), "lse is off by")  # what it would say if it were asked
    for hand, right in ((Hand(), True), (faulty(scores=lambda x: x.half().float()), False)):
        trial = tried_by(hand, case, numerics=replace(numerics, exp="expf"))
        assert integer_scores.ORACLE.concerns(trial)
        assert acquitted(integer_scores.judge(trial)) is right


# Counting: exp(0) need not be 1, and then every rescale multiplies what came before by it.

COUNTED = Problem(**(SHAPE | {"seqlen_q": 8}), seed=3, distribution="counting", mask=Causal())


def off_by(error: float) -> Hand:
    """A kernel whose exponentials, those of rescales included, are that far off."""
    return faulty(exp2=lambda x: torch.exp2(x) * (1 + error))


@pytest.mark.parametrize("error", [1.12e-4, -1.12e-4, -5e-5])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_exponential_of_0_within_its_error_is_no_miscount(dtype: str, error: float) -> None:
    case = COUNTED.but(dtype=dtype, seqlen_kv=400)
    trial = tried_by(off_by(error), case, numerics=Numerics(exp="fexp_u20"))
    assert float((trial.first.outputs["lse"] - math.log(400)).abs()[..., -1].min()) > 3 * abs(
        error
    ), "13 blocks"
    assert acquitted(counting.judge(trial))
    assert acquitted(bound.judge(trial))
    convicted(
        counting.judge(tried_by(off_by(1e-3), case, numerics=Numerics(exp="fexp_u20"))), "counts"
    )


@pytest.mark.parametrize("exp", ["ex2.approx", "fexp_u20"])
@pytest.mark.parametrize("name", ["out", "lse"])
def test_a_key_too_many_is_a_miscount_all_the_same(name: str, exp: str) -> None:
    trial = tried_by(off_by(0.0), COUNTED, numerics=Numerics(exp=exp))
    other = tried_by(off_by(0.0), COUNTED.but(mask=Window(None, 1)))
    assert acquitted(counting.judge(trial))
    trial.launches["first"] = replace(
        trial.first, outputs=trial.first.outputs | {name: other.first.outputs[name]}
    )
    assert convicted(counting.judge(trial), "miscount").where.startswith(f"{name}[")


def test_blocks_leave_no_room_where_exp_0_was_measured_to_be_1() -> None:
    drift = tried_by(
        off_by(2 * 2.0**-23),
        COUNTED.but(seqlen_kv=2048, dtype="float32"),
        numerics=Numerics(exp="ex2.approx"),
    )
    assert acquitted(counting.judge(drift))
    drift.arch = "sm_90"
    convicted(counting.judge(drift), "miscount")


@pytest.mark.parametrize("exp", ["__expf", "ex2.approx.f16", "ex2.approx.ftz.bf16"])
def test_counting_takes_exponentials_whose_error_is_not_one_number(exp: str) -> None:
    case, numerics = COUNTED.but(seqlen_kv=40, heads_q=2), Numerics(exp=exp, block_n=16)
    for luck in Luck:
        trial, result = (
            trial_of(case, numerics=numerics),
            emulate(case, Kernel("honest", numerics, arch="cpu"), luck),
        )
        trial.launches["first"] = Launch(OK, "nan", {"out": result.out, "lse": result.lse})
        assert acquitted(counting.judge(trial))
    trial.launches["first"] = right_run(trial_of(case.but(mask=Window(2, 0))))
    convicted(counting.judge(trial), "miscount")


# Causality and poison: where a maximum may lag, rows of a tile decide together when to catch up
# with it.

LAGGING = Problem(**(SHAPE | {"dtype": "float32"}), seed=4, mask=Causal(), softmax_scale=1.0)
Forward = Callable[[Problem, Mapping[str, Tensor]], dict[str, Tensor]]


def voting(p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Blocks of 16 keys; all rows of a head take the new maximum when one of them is more than 8
    log2 units behind."""
    q, k, v = (given[name].repeat_interleave(p.group if name in "kv" else 1, 1) for name in "qkv")
    seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
    top, total, acc = (
        torch.full(p.shape_q[:3], -math.inf),
        torch.zeros(p.shape_q[:3]),
        torch.zeros(p.shape_out),
    )
    for start in range(0, p.seqlen_kv, 16):
        part = slice(start, start + 16)
        s = (q @ k[:, :, part].mT * (p.scale * LOG2_E)).masked_fill(~seen[..., part], -math.inf)
        new, before = torch.maximum(top, s.amax(-1)), top
        top = torch.where((top == -math.inf) | (new - top > 8).any(-1, keepdim=True), new, top)
        base = top.clamp(min=torch.finfo(torch.float32).min)
        weights, shrink = torch.exp2(s - base[..., None]), torch.exp2(before - base)
        total, acc = (
            total * shrink + weights.sum(-1),
            acc * shrink[..., None] + weights @ v[:, :, part],
        )
    return {
        "out": (acc / total[..., None]).to(p.format_out.torch),
        "lse": (top + total.log2()) * math.log(2),
    }


def nudged(by: float) -> Forward:
    """A right forward, but that every launch after the first multiplies one number by 1 + by."""
    factors = itertools.chain([1.0], itertools.repeat(1 + by))

    def forward(p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = Hand().forward(p, given)
        found["out"][0, 0, 0, 0] *= next(factors)
        return found

    return forward


def relation(oracle: Oracle, forward: Forward, lag: float, case: Problem = LAGGING) -> Ruling:
    """What causality or poison says of a forward that declares that lag, and promises its bits."""
    trial = asked(
        forward, case, declared(numerics=Numerics(exp="exp2f", block_n=16, lazy_rescale=lag))
    )
    assert acquitted(bound.judge(trial))
    assert oracle.concerns(trial)
    return oracle.judge(trial)


@pytest.mark.parametrize("oracle", [causality.FORWARD, poison.ORACLE], ids=["causality", "poison"])
def test_rows_that_vote_on_a_rescale_are_held_to_their_bounds(oracle: Oracle) -> None:
    rulings = [
        relation(oracle, voting, lag, LAGGING.but(seed=seed))
        for lag in (0.0, 8.0)
        for seed in (4, 5)
    ]
    assert not all(map(acquitted, rulings[:2])), "the scores of one row reach the bits of another"
    assert all(map(acquitted, rulings[2:]))
    assert acquitted(relation(oracle, nudged(2.0**-23), 8.0))
    convicted(relation(oracle, nudged(2.0**-23), 0.0), "; 1 of")
    convicted(relation(oracle, nudged(1e-3), 8.0), "out[b=0, h=0, q=0, d=0]")


@dataclass(frozen=True)
class Voting(Hand):
    """A forward whose rows vote.  factors: what dQ of the first rows is multiplied by, launch by
    launch."""

    factors: Iterator[float] = field(default_factory=lambda: itertools.repeat(1.0))

    def forward(self, p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return voting(p, given)

    def backward(self, p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = super().backward(p, given)
        found["dq"][:, :, 0] *= next(self.factors)
        return found


def test_gradients_of_rows_that_vote_on_a_rescale_are_held_to_their_bounds() -> None:
    def ruling(seed: int, lag: float, *factors: float) -> Ruling:
        numerics = Numerics(exp="exp2f", block_n=16, lazy_rescale=lag)
        hand = Voting(factors=itertools.chain(factors, itertools.repeat(1.0)))
        trial = tried_by(
            hand, LAGGING.but(seed=seed, mask=Window(30, 0)), "backward", numerics=numerics
        )
        assert acquitted(bound.judge_backward(trial))
        return causality.judge_backward(trial)

    assert not all(acquitted(ruling(seed, 0.0)) for seed in range(4, 14)), (
        "the scores of one row reach the bits of another"
    )
    assert all(acquitted(ruling(seed, 8.0)) for seed in range(4, 14))
    convicted(ruling(7, 8.0, 1.0, 1.0, 1.001), "changed: dq is off by")
    convicted(ruling(7, 8.0, 1.0, 1 + 2.0**-20), "from row", "dq should keep its bits")


def test_infinities_are_planted_where_masked_values_may_be_anything() -> None:
    """A kernel that takes NaN alone out of V, and one that takes out all that is not finite."""
    contract = Contract(masked_values="any", nan="any")
    only_nan = faulty(load=lambda name, x: torch.where(x.isnan(), 0.0, x) if name == "v" else x)
    finite = faulty(load=lambda name, x: torch.where(x.isfinite(), x, 0.0) if name == "v" else x)
    for seed in range(8):
        case = Problem(**SHAPE, seed=seed, mask=Causal())
        assert acquitted(poison.judge(tried_by(finite, case, contract=contract)))
        ruling = poison.judge(tried_by(only_nan, case, contract=contract))
        assert bool(ruling.finding) is bool(seed & 2), seed
        assert bool(
            poison.poisoned(tried(case, contract=Contract(masked_values="finite")))
            .inputs.v.isfinite()
            .all()
        )
    eight = poison.poisoned(
        tried(case.but(dtype="float8_e4m3fn", seed=2), contract=contract)
    ).inputs
    assert bool(eight.v.double().isnan().any()), "a format without infinities"


# Powers of two, backward: what is rounded to a format of short range is asked for no more than that
# allows.

OCTAVES = Problem(**SHAPE, distribution="octaves", mask=Causal())
WIDE = GradientNumerics(probability="float32", score_gradient="float32", block_m=0, block_n=0)


@dataclass(frozen=True)
class Short(Hand):
    """P and dS in fp32.  by_head: whether each query head's dK and dV are rounded to the inputs'
    dtype; more: added to dQ."""

    by_head: bool = False
    more: float = 0.0

    def backward(self, p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        alone = p.but(dtype="float32", heads_kv=p.heads_q)
        found = super().backward(
            alone, given | {name: given[name].repeat_interleave(p.group, 1) for name in ("k", "v")}
        )
        for name in ("dk", "dv"):
            each = found[name].to(p.format.torch).float() if self.by_head else found[name]
            found[name] = each.unflatten(1, (p.heads_kv, p.group)).sum(2)
        return {
            name: x.to(p.format.torch)
            for name, x in (found | {"dq": found["dq"] + self.more}).items()
        }


SHORT = [
    ({"delta": "input"}, Short(delta=lambda x: x.half().float())),
    ({"group": "cast"}, Short(by_head=True)),
]


@pytest.mark.parametrize(("declared", "kernel"), SHORT, ids=["delta", "by head"])
def test_what_is_rounded_to_fp16_on_the_way_is_not_asked_to_scale(
    declared: dict[str, str], kernel: Short
) -> None:
    def rulings(kernel: Short, **declared: str) -> list[Ruling]:
        cases, gradients = [OCTAVES.but(seed=seed) for seed in range(12)], replace(WIDE, **declared)
        trials = [tried_by(kernel, case, "backward", gradients=gradients) for case in cases]
        assert all(power_of_two.BACKWARD.concerns(trial) for trial in trials)
        return [power_of_two.judge_backward(trial) for trial in trials]

    assert all(map(acquitted, rulings(kernel, **declared)))
    assert not all(map(acquitted, rulings(kernel))), "what the declaration is for"
    assert not all(map(acquitted, rulings(replace(kernel, more=1e-5), **declared)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_ranges_are_told_from_the_declaration(dtype: str) -> None:
    def backward(heads_kv: int = 2, **changes: object) -> Trial:
        return tried_by(
            Hand(),
            OCTAVES.but(dtype=dtype, heads_kv=heads_kv),
            "backward",
            gradients=replace(WIDE, **changes),
        )

    short = dtype == "float16"
    assert power_of_two._wide_dscores(backward())
    for changes in ({"delta": "input"}, {"score_gradient": "input"}):
        assert power_of_two._wide_dscores(backward(**changes)) is not short
    narrow = power_of_two._summed_narrowly
    assert narrow(backward()) == narrow(backward(atomics=("dq",))) == ()
    assert narrow(backward(group="cast")) == (("dk", "dv") if short else ())
    assert narrow(backward(heads_kv=4, group="cast")) == ()
    assert narrow(backward(atomics=("dq", "dk"), atomics_dtype="input")) == (
        ("dq", "dk") if short else ()
    )


def test_keys_that_the_scale_has_multiplied_stay_normal() -> None:
    moved = set()
    for seed, scale in itertools.product(range(4), (32**-0.5, 2.0**-6, 2.0**-9)):
        case = OCTAVES.but(seed=seed, softmax_scale=scale)
        trial = tried_by(Hand(), case, "backward", gradients=replace(WIDE, prescale="k"))
        a, _ = power_of_two.exponents(trial)
        moved.add(a)
        sizes = (trial.expanded[1].double() * scale * LOG2_E * 2.0**-a).abs()
        assert not a or 2.0**-14 <= float(sizes[sizes > 0].min()) <= float(sizes.max()) <= 65504
    assert len(moved) > 2


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_outputs_in_8_bits_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(
        ValueError, match=f"^support.dtypes_out: no oracle judges outputs in {dtype}$"
    ):
        replace(SUPPORT, dtypes_out=("float16", dtype))
    assert replace(SUPPORT, dtypes_out=("float16", "float32")).dtypes_out == ("float16", "float32")


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_weights_divided_by_a_rounded_lse_are_counted_with_its_error(
    dtype: str, normalised: bool
) -> None:
    """P = exp(S - LSE) is 1 / n only as well as the LSE is rounded, and is itself rounded for its
    product."""
    numerics = Numerics(block_n=0, normaliser="lse", normalised=normalised, exp="vexp")
    for keys in range(60, 300, 7):
        case = Problem(
            seqlen_q=1, seqlen_kv=keys, head_dim=16, dtype=dtype, distribution="counting", seed=1
        )
        for doubled in (0, 1):
            trial = trial_of(case, numerics=numerics)
            scores = torch.zeros(1, 1, 1, keys + doubled)
            lse = scores.logsumexp(-1)
            weights = torch.exp(scores - lse[..., None]).to(case.format.torch).float()
            values = trial.expanded[2].float()
            values = torch.cat([values, values[..., :doubled, :]], -2)
            out = (weights @ values).to(case.format.torch)
            trial.launches["first"] = Launch(OK, "nan", {"out": out, "lse": lse})
            assert (counting.judge(trial).finding is not None) == bool(doubled)


# tf32 cuts P towards zero: a weight of 1 / n, or just below 1, is off by more than fp32's rounding.

CUT = Numerics(float32_products="tf32", probability="float32", exp="expf", block_n=32)


def emulated(
    case: Problem,
    numerics: Numerics,
    style: str,
    luck: Luck = Luck.NEAREST,
    of: Problem | None = None,
) -> Trial:
    """The trial of what an honest kernel gives on an H100; of: for another problem's mask or
    values."""
    trial = trial_of(case, numerics=numerics)
    trial.arch = "sm_90"
    result = emulate(of or case, Kernel("honest", numerics, arch="sm_90", style=style), luck)
    trial.launches["first"] = Launch(OK, "nan", {"out": result.out, "lse": result.lse})
    return trial


@pytest.mark.parametrize("style", ["online", "eager", "split"])
def test_weights_that_tf32_cuts_are_counted_as_it_may_cut_them(style: str) -> None:
    numerics = replace(
        CUT,
        **{"eager": {"normalised": True, "block_n": 0}, "split": {"split_keys": True}}.get(
            style, {}
        ),
    )
    case, seen = COUNTED.but(dtype="float32", seqlen_kv=49), []
    for luck in Luck:
        trial = emulated(case, numerics, style, luck)
        assert acquitted(counting.judge(trial))
        seen.append(float((trial.first.outputs["out"][..., 0] - 1).abs().max()))
        past = (
            (trial.truth.out + 1.01 * trial.truth.out_bound)
            .masked_fill(trial.truth.empty[..., None], 0.0)
            .float()
        )
        trial.launches["first"] = replace(trial.first, outputs=trial.first.outputs | {"out": past})
        convicted(counting.judge(trial), "miscount")
        convicted(
            counting.judge(emulated(case, numerics, style, luck, case.but(mask=Window(None, 1)))),
            "miscount",
        )
    assert max(seen) > 1e-4, "what fp32 alone would not explain"


def test_a_winner_that_tf32_cuts_is_gathered_to_the_bits_that_its_values_have() -> None:
    """One fma per exponent: the winner's is only as near 0 as its product with the scale was
    rounded."""
    off = 0
    for seed in range(6):
        case = Problem(**SHAPE, seed=seed, distribution="gather")
        trial = emulated(case, CUT, "fused")
        assert acquitted(gather.judge(trial))
        targets = gather_targets(case)[..., None].expand(case.shape_out)
        rows = trial.expanded[2].repeat_interleave(2, 1).gather(2, targets)
        off += int((trial.first.outputs["out"] != rows).sum())
        for factor in (1 - 2.0**-8, 1 + 2.0**-7):
            trial.first.outputs["out"][0, 1, 5] = rows[0, 1, 5] * factor
            convicted(gather.judge(trial), "out[b=0, h=1, q=5]")
        trial.first.outputs["out"][0, 1, 5] = rows[0, 1, 5]
        trial.first.outputs["out"][0, 0, 3] = trial.expanded[2][0, 0, int(targets[0, 0, 3, 0]) - 1]
        convicted(gather.judge(trial), "out[b=0, h=0, q=3] should be row", ", is row")
        convicted(
            gather.judge(
                emulated(case, replace(CUT, float32_products="ieee"), "fused", of=case.but(seed=9))
            ),
            "rows are wrong",
        )
    assert off


COARSE = Numerics(exp="ex2.approx.ftz.bf16", block_n=16, prescale="sqrt")


def test_a_softcap_that_coarse_arithmetic_hides_contradicts_nothing() -> None:
    """Its bound holds the declared form and another one."""
    declaration = declared(numerics=COARSE, dtypes=("bfloat16",))
    for case in (problem for problem in contract.asks(declaration, "bfloat16") if problem.softcap):
        right, uncapped = (
            contract.judge(asked(Direct(cap=cap), case, declaration))
            for cap in (Direct().cap, lambda s, c: s)
        )
        assert acquitted(right)
        assert (
            right.observed["softcap"] == "undecided"
            if case.mask.name == "full"
            else "softcap and mask" in right.observed
        )
        convicted(uncapped, "softcap")


def test_rows_without_a_key_say_nothing_of_the_lse() -> None:
    """A kernel that has causal masks alone is asked for its LSE under one, beside rows that see
    nothing."""
    declaration = declared(
        numerics=Numerics(exp="vexp", block_n=0), masks=("causal",), softcap=False
    )
    cases = [
        case
        for case in contract.asks(declaration, "float32")
        if case.mask == Causal() and case.seqlen_q > case.seqlen_kv
    ]
    assert cases
    base_2 = Direct(lse=lambda natural, top, total, scale: natural * LOG2_E)
    for case in cases:
        right = contract.judge(asked(Direct(), case, declaration))
        assert acquitted(right)
        assert right.observed["LSE"] == "natural"
        convicted(
            contract.judge(asked(base_2, case, declaration)), "declares LSE natural, is base 2"
        )
