"""Poison in a backward: honest kernels do not notice it, and 0 * NaN and 0 * infinity are
convicted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from references.masks import Causal, Full, Lengths, Mask, Window, intersect
from tests.faults.fault import BACKWARD_KERNELS, TRITON_BACKWARD, plant
from tests.faults.stand import Stand, finest
from tests.harness.declared import flat_gradients
from tests.harness.fake_trials import DECLARED, acquitted, convicted
from tests.harness.honest_backwards import COMPOSITE
from tests.harness.reference_kernel import Hand, Judge, tried_by
from tests.properties import tier
from verify.cell.process import ROOT
from verify.judging.poisoning import (
    HUGE,
    between_read,
    gradient_poisoning,
    keys_read,
    padded,
)
from verify.judging.trial import Trial
from verify.oracles import poison
from verify.problem import Problem
from verify.variant import Contract, Declaration

torch.set_num_threads(1)

SHAPE = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seqlen_q": 20, "seqlen_kv": 24, "head_dim": 16}
RAGGED = intersect(Causal(), Lengths((20, 11), (24, 9)))
MASKS: tuple[Mask, ...] = (
    Causal(),
    Causal("tl"),
    Window(5, 2),
    RAGGED,
    Lengths((20, 3), (0, 24)),
)


def problem(dtype: str = "float16", mask: Mask = RAGGED, **changes: object) -> Problem:
    return Problem(**(SHAPE | {"dtype": dtype, "mask": mask, "seed": 5} | changes))


@dataclass(frozen=True)
class Masking(Hand):
    """A backward that hides a pair in one of several ways, most of them wrong."""

    way: str = "replaced"
    skips: bool = False  # padding is not loaded
    own: bool = False  # P is a softmax of its own, and delta the sum of P dP

    def backward(self, p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        q, k, v = (given[name].float().expand(p.shapes[name]) for name in "qkv")
        dout, dtype = given["dout"].float(), p.format.torch
        seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
        if self.skips:
            keys, rows = keys_read(p, seen)[..., None], seen.any(-1)[..., None]
            k, v = k.where(keys, 0.0), v.where(keys, 0.0)
            q, dout = q.where(rows, 0.0), dout.where(rows, 0.0)
        k, v = (x.repeat_interleave(p.group, 1) for x in (k, v))
        scores, dp = q @ k.mT * p.scale, dout @ v.mT
        weights, delta = self._weights(scores, seen, given, dp, dout)
        ds = weights * (dp - delta)
        if self.way == "dS not masked":
            ds = torch.exp(scores - given["lse"].clamp(min=-1e4)[..., None]) * (dp - delta)
        elif self.way != "P alone":
            ds = ds.masked_fill(~seen, 0.0)
        ds, weights = ds.to(dtype).float(), weights.to(dtype).float()
        by_head = p.batch, p.heads_kv, p.group
        dk, dv = ds.mT @ q * p.scale, weights.mT @ dout
        dk, dv = (x.view(*by_head, *x.shape[2:]).sum(2) for x in (dk, dv))
        return {"dq": (ds @ k * p.scale).to(dtype), "dk": dk.to(dtype), "dv": dv.to(dtype)}

    def _weights(
        self, scores: Tensor, seen: Tensor, given: Mapping[str, Tensor], dp: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor]:
        """P and delta."""
        if self.own:
            weights = torch.softmax(scores.masked_fill(~seen, -1e30), -1).masked_fill(~seen, 0.0)
            return weights, (weights * dp).masked_fill(~seen, 0.0).sum(-1, keepdim=True)
        delta = (dout * given["out"].float()).sum(-1, keepdim=True)
        lse = given["lse"].masked_fill(given["lse"] == -math.inf, 0.0)[..., None]
        if self.way == "P times 0":
            return torch.exp(scores - lse) * seen, delta
        if self.way == "minus 1e3":
            return torch.exp(scores - 1e3 * ~seen - lse), delta
        return torch.exp(scores - lse).masked_fill(~seen, 0.0), delta


def tried(hand: Hand, case: Problem, masked_values: str = "finite", **changes: object) -> Trial:
    """The trial of a backward behind a right forward."""
    contract = Contract(masked_values_backward=masked_values)
    trial = tried_by(hand, case, "backward", **({"contract": contract} | changes))
    trial.launches["saved"] = tried_by(Hand(), case).first
    return trial


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_right_backward_notices_no_poison(dtype: str, mask: Mask) -> None:
    for seed in range(3):
        case = problem(dtype, mask, seed=seed)
        for way in ("replaced", "P alone"):
            trial = tried(Masking(way=way), case)
            assert poison.BACKWARD.concerns(trial)
            assert acquitted(poison.judge_backward(trial)), (way, case.name)
        padding = tried(Masking(skips=True), case, "padding")
        assert acquitted(poison.judge_backward(padding)), case.name
        own = tried(Masking(own=True), case, gradients=flat_gradients(**COMPOSITE))
        assert acquitted(poison.judge_backward(own)), case.name


@pytest.mark.parametrize("scale", [1e8, 2.0**126, -(2.0**118), 2.0**-100, 0.0])
def test_poison_overflows_no_right_backward_at_any_scale(scale: float) -> None:
    for dtype in ("float16", "bfloat16", "float32"):
        case = problem(dtype, RAGGED, softmax_scale=scale)
        assert acquitted(poison.judge_backward(tried(Masking(way="P alone"), case)))


FAULTS = {
    "P times 0": "should keep its bits",
    "minus 1e3": "should keep its bits",
    "dS not masked": "should keep its bits",
}


@pytest.mark.parametrize("way", FAULTS)
def test_a_hidden_pair_that_is_not_replaced_is_convicted(way: str) -> None:
    for dtype in ("float16", "bfloat16"):
        trial = tried(Masking(way=way), problem(dtype, Causal(), seed=7))
        finding = convicted(poison.judge_backward(trial), "huge values in", FAULTS[way])
        assert finding.where.startswith(("dq[", "dk[", "dv["))


def test_padding_in_a_product_with_zeros_is_convicted_where_the_contract_has_it() -> None:
    """K of a hidden key in dS K, and Q and dO of a hidden row in dS^T Q and P^T dO."""
    case = problem()
    finding = convicted(
        poison.judge_backward(tried(Masking(), case, "padding")),
        "NaN or infinities in padding, and huge values in",
        "became nan",
    )
    assert finding.where.startswith("dq[")
    for masked_values in ("padding", "any"):
        assert not acquitted(poison.judge_backward(tried(Masking(), case, masked_values)))
    assert acquitted(poison.judge_backward(tried(Masking(), case, "finite")))


def test_a_hidden_ds_that_is_nan_is_convicted() -> None:
    """P is 0 at a hidden key, and its dP is NaN."""
    case = problem("float16", Lengths((20, 20), (24, 15)))

    @dataclass(frozen=True)
    class Loads(Masking):
        """Loads V of padding, but not its K."""

        def backward(self, p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
            seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
            k = given["k"].where(keys_read(p, seen)[..., None], 0.0)
            return super().backward(p, {**given, "k": k})

    right = tried(Loads(), case, "padding")
    assert acquitted(poison.judge_backward(right))
    finding = convicted(poison.judge_backward(tried(Loads(way="P alone"), case, "padding")), "nan")
    assert finding.where.startswith(("dq[", "dk["))


def test_a_backward_that_does_not_repeat_is_held_to_its_bounds() -> None:
    contract = Contract(deterministic_backward=False)
    for seed in range(3):
        trial = tried(Masking(), problem(seed=seed), contract=contract)
        for tensor in trial.run("poisoned", inputs=gradient_poisoning(trial).inputs).outputs:
            assert tensor in ("dq", "dk", "dv")
        assert acquitted(poison.judge_backward(trial))
    convicted(
        poison.judge_backward(tried(Masking(way="P times 0"), problem(), contract=contract)),
        "elements are out of bounds",
    )


def test_poison_lies_only_where_no_gradient_that_is_judged_depends_on_it() -> None:
    for mask in MASKS:
        for masked_values in ("any", "padding", "finite"):
            case = problem(mask=mask)
            trial = tried(Masking(), case, masked_values)
            found = gradient_poisoning(trial)
            seen = case.mask.dense(2, 4, 20, 24)
            given = {**trial.inputs.named, "dout": trial.dout}
            changed = {
                name: ~(found.inputs.named[name] == values).all(-1)
                for name, values in given.items()
            }
            keys = (changed["k"] | changed["v"]).repeat_interleave(case.group, 1)
            rows = changed["q"] | changed["dout"]
            dq, dk = found.kept["dq"], found.kept["dk"].repeat_interleave(case.group, 1)
            assert not bool((seen & keys[:, :, None] & dq[..., None]).any())
            assert not bool((seen & rows[..., None] & dk[:, :, None]).any())
            live = seen.any(-1)
            assert bool((dq & live).any()), "the pivot is judged"
            assert bool((found.kept["dk"] & keys_read(case, seen)).any())
            spoiled = found.inputs.k.isnan() | found.inputs.k.isinf()
            if masked_values == "finite":
                assert not bool(spoiled.any())
            elif masked_values == "padding":
                assert torch.equal(spoiled.any(-1), ~between_read(keys_read(case, seen)))
            assert torch.equal(found.kept["dk"], found.kept["dv"])


def test_what_a_softmax_of_its_own_mixes_is_not_judged() -> None:
    """Keys that are seen by a row that sees poison too."""
    saved, own = (
        gradient_poisoning(tried(Masking(), problem(mask=Causal()), **changes)).kept["dk"]
        for changes in ({}, {"gradients": flat_gradients(**COMPOSITE)})
    )
    assert bool((saved & ~own).any())
    assert not bool((own & ~saved).any())


def test_poison_is_huge_but_no_score_and_no_factor_overflows() -> None:
    for dtype in ("float16", "bfloat16", "float32"):
        trial = tried(Masking(), problem(dtype))
        given = gradient_poisoning(trial).inputs.named
        q, k, v, dout = (given[name].double() for name in ("q", "k", "v", "dout"))
        assert float(k.abs().max()) == HUGE
        assert float(dout.abs().max()) == HUGE
        largest = q.abs().amax((2, 3)).max() * k.abs().sum(-1).max()
        assert float(largest) < 2.0**100
        assert float(dout.abs().sum(-1).max() * v.abs().max()) < 2.0**100


def test_a_problem_without_padding_gets_some_if_the_support_has_lengths() -> None:
    case = problem(mask=Causal())
    found = padded(case, DECLARED.support)
    assert found.mask.name.startswith("causal+lengths.")
    seen = found.mask.dense(2, 4, 20, 24)
    assert not bool(keys_read(found, seen)[..., -1].any())
    assert padded(found, DECLARED.support) == found
    assert padded(problem(), DECLARED.support) == problem()
    without = replace(DECLARED.support, masks=("full", "causal"))
    assert padded(case, without) == case
    assert padded(problem(seqlen_q=0), DECLARED.support).seqlen_q == 0


def test_an_unmasked_problem_has_nowhere_to_hide_poison() -> None:
    assert not poison.BACKWARD.concerns(tried(Masking(), problem(mask=Full())))
    full = replace(DECLARED, support=replace(DECLARED.support, masks=("full",)))
    assert poison.BACKWARD.excludes(full) == "supports no mask"


def test_sequences_without_rows_or_keys_are_padding_as_a_whole() -> None:
    for changes in ({"seqlen_q": 0}, {"seqlen_kv": 0}):
        case = problem(mask=Causal(), **changes)
        trial = tried(Masking(), case, "padding")
        assert isinstance(trial, Judge)
        found = gradient_poisoning(trial)
        assert found.count > 0
        assert all(bool(kept.all()) for kept in found.kept.values())
        assert acquitted(poison.judge_backward(trial))


# The shipped kernel, and faults in it.

TRITON, ATOMIC = "triton-flash-backward", "triton-flash-backward-atomic"
PADDED = "b=2,hq=2,hkv=1,sq=20,skv=40,d=16,dtype=float16,mask=causal+lengths.17_20.33_21,seed=3"
PLANTED = {
    "keys behind the last one that a row sees are loaded for dQ": (
        TRITON,
        (
            "loaded = ((key >= first) & (key < last))[:, None]",
            "loaded = (key < seqlen_kv)[:, None]",
        ),
    ),
    "a hidden dS is not set to 0": (
        TRITON,
        ("ds = tl.where(visible, ds, 0.0)\n                ds = ds.to", "ds = ds.to"),
    ),
    "keys that no row sees enter atomic dQ": (
        ATOMIC,
        ("k_seen = tl.where(seen[:, None], k_tile, 0.0)", "k_seen = k_tile"),
    ),
    "rows without a key are loaded for dK": (
        TRITON,
        ("q_mask = q_mask & sees[:, None]", "q_mask = q_mask & (rows < seqlen_q)[:, None]"),
    ),
}


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    with Stand() as opened:
        yield opened


def outcome(stand: Stand, kernel: Declaration) -> str:
    verdicts = stand.verdicts(kernel, finest(kernel), "poison_backward", Problem.parse(PADDED))
    return next(v.outcome for v in verdicts if v.oracle == "poison_backward")


@pytest.mark.parametrize("name", tier.for_ci(PLANTED, keep=0))
def test_padding_that_a_triton_backward_lets_in_is_convicted(name: str, stand: Stand) -> None:
    variant, (right, wrong) = PLANTED[name]
    if name == "a hidden dS is not set to 0":  # the line before it is the condition
        right = f"if EDGE == 1:\n                    {right}"

    def edit(text: str) -> str:
        assert text.count(right) == 1
        return text.replace(right, wrong)

    place = stand.folder / f"fault {list(PLANTED).index(name)}"
    path = plant(place, TRITON_BACKWARD, BACKWARD_KERNELS, edit)
    assert outcome(stand, stand.load(path, variant)) == "fail"
    assert outcome(stand, stand.load(ROOT / TRITON_BACKWARD, variant)) == "pass"
