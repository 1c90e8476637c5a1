"""Long sequences, backward: chosen rows and keys are those of the whole, exact gradients pass, and
what wraps is convicted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from references import attention
from references.masks import Causal, Full, Lengths, Mask, Window
from references.score_mods import ScoreMod, Softcap
from tests.harness import long_trials
from tests.harness.declared import flat_gradients
from tests.harness.fake_trials import OK, convicted, trial_of
from tests.properties import tier
from verify.cell.process import Environment
from verify.judging.findings import Ruling
from verify.judging.launch import Launch
from verify.judging.selected_positions import Given, column_gradients, positions, row_gradients
from verify.judging.trial import Trial
from verify.oracles import of_group
from verify.oracles.long import long_columns
from verify.oracles.long import problems as long
from verify.problem import Problem
from verify.tolerance import backward
from verify.tolerance.gradients_arithmetic import resolve
from verify.variant import Config, GradientNumerics

torch.set_num_threads(1)

WIDE, TALL = long_trials.WIDE.but(seqlen_q=4), long_trials.TALL.but(seqlen_kv=20)

Tensors = dict[str, Tensor]
Kernel = Callable[[Problem, Tensors], Tensors]


def saved_run(trial: Trial) -> Launch:
    """What an exact forward saves, rounded."""
    p = trial.problem
    found = attention.forward(*trial.expanded, attention.Attention(p.mask, p.scale, p.score_mod))
    return Launch(OK, "nan", {"out": found.out.to(p.format_out.torch), "lse": found.lse.float()})


def right(p: Problem, x: Tensors) -> Tensors:
    """fp64 gradients of exact arithmetic on what was saved, as the formulas of
    `references.attention` have them."""
    rows, keys = torch.arange(x["q"].shape[2])[:, None], torch.arange(x["k"].shape[2])
    k, v = (x[name].repeat_interleave(p.group, 1) for name in "kv")
    seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)[
        ..., rows[:, 0].clamp(max=p.seqlen_q - 1), :
    ]
    scores = p.scale * x["q"] @ k.mT
    weights = torch.exp(scores - x["lse"][..., None]).masked_fill(~seen[..., : len(keys)], 0.0)
    delta = (x["dout"] * x["out"]).sum(-1, keepdim=True)
    ds = weights * (x["dout"] @ v.mT - delta)

    def folded(part: Tensor) -> Tensor:
        return part.view(p.batch, p.heads_kv, p.group, *part.shape[2:]).sum(2)

    return {
        "dq": p.scale * ds @ k,
        "dk": folded(p.scale * ds.mT @ x["q"]),
        "dv": folded(weights.mT @ x["dout"]),
    }


def tried(problem: Problem, kernel: Kernel = right) -> Trial:
    """A backward trial whose forward was right."""
    trial = trial_of(problem, gradients=GradientNumerics(), entries=("forward", "backward"))
    trial.entry = "backward"
    trial.launches["saved"] = saved_run(trial)
    saved = trial.saved.outputs
    given = dict(zip("qkv", trial.expanded, strict=True)) | {
        "dout": trial.dout,
        "out": saved["out"],
        "lse": saved["lse"],
    }
    found = kernel(problem, {name: tensor.double() for name, tensor in given.items()})
    trial.launches["first"] = Launch(
        OK, "nan", {name: found[name].to(problem.format.torch) for name in ("dq", "dk", "dv")}
    )
    return trial


def heard(trial: Trial) -> dict[str, Ruling]:
    """What the group's oracles say, by name."""
    asked = [
        o
        for o in of_group("long_gradients")
        if o.excludes(trial.declaration) is None and o.concerns(trial)
    ]
    return {oracle.name: oracle.judge(trial) for oracle in asked}


CORRECT = {
    "few rows": WIDE,
    "few rows, causal": WIDE.but(mask=Causal(), dtype="float32"),
    "few rows, gather": WIDE.but(distribution="gather_integers"),
    "few keys": TALL,
    "few keys, top left": TALL.but(mask=Causal("tl"), dtype="bfloat16"),
    "few keys, gather": TALL.but(distribution="gather_integers"),
    "many sequences": Problem(batch=2000, seqlen_q=2, seqlen_kv=5, head_dim=16, dtype="float16"),
}


@pytest.mark.parametrize("name", tier.for_ci(CORRECT, keep=2))
def test_correct_gradients_pass(name: str) -> None:
    rulings = heard(tried(CORRECT[name]))
    assert len(rulings) >= 1
    assert all(ruling.finding is None for ruling in rulings.values()), [
        r.finding for r in rulings.values() if r.finding
    ]


def test_right_answers_to_all_that_a_gpu_is_asked_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """With shorter sides."""
    for name, value in {
        "LONG": 577,
        "_CROWD": 70,
        "environment": lambda: Environment("", "cuda"),
    }.items():
        monkeypatch.setattr(long, name, value)
    asked = long.backward_problems(
        trial_of(WIDE, gradients=GradientNumerics()).declaration, "float16"
    )
    assert len(asked) == 6
    for problem in asked:
        rulings = heard(tried(problem))
        assert all(ruling.finding is None for ruling in rulings.values()), (problem.name, rulings)


def keys_dropped(limit: int) -> Kernel:
    """dK and dV of keys whose index wraps are never added to."""

    def kernel(p: Problem, x: Tensors) -> Tensors:
        found = right(p, x)
        found["dk"][:, :, limit:], found["dv"][:, :, limit:] = 0.0, 0.0
        return found

    return kernel


def unread_keys(limit: int) -> Kernel:
    """dQ of the keys before the index wraps alone."""

    def kernel(p: Problem, x: Tensors) -> Tensors:
        part = right(p, x | {"k": x["k"][:, :, :limit], "v": x["v"][:, :, :limit]})
        return right(p, x) | {"dq": part["dq"]}

    return kernel


def rows_dropped(first: int) -> Kernel:
    """Rows from there on reach neither dK nor dV; their dQ is right."""

    def kernel(p: Problem, x: Tensors) -> Tensors:
        part = right(p, x | {name: x[name][:, :, :first] for name in ("q", "dout", "out", "lse")})
        return part | {"dq": right(p, x)["dq"]}

    return kernel


def delta_wraps(p: Problem, x: Tensors) -> Tensors:
    """LSE and O of the rows past 65535 are read from the beginning."""
    index = torch.arange(p.seqlen_q) % (1 << 16)
    return right(p, x | {name: x[name][:, :, index] for name in ("out", "lse")})


def values_wrap(p: Problem, x: Tensors) -> Tensors:
    """V read at an offset that wraps."""
    return right(p, x | {"v": x["v"][:, :, torch.arange(p.seqlen_kv) % (1 << 15)]})


def moved_dv(p: Problem, x: Tensors) -> Tensors:
    """dV of the last tile lies one key further."""
    found = right(p, x)
    last = p.seqlen_kv // 64 * 64
    found["dv"][:, :, last:] = found["dv"][:, :, last:].roll(1, 2)
    return found


FAULTS: dict[str, tuple[Problem, Kernel, set[str]]] = {
    "dK and dV past 32768 keys": (WIDE, keys_dropped(1 << 15), {"long_columns"}),
    "dK and dV past 65536 keys": (WIDE, keys_dropped(1 << 16), {"long_columns"}),
    "keys past 32768 unread for dQ": (WIDE, unread_keys(1 << 15), {"long_columns"}),
    "offsets of V wrap": (WIDE, values_wrap, {"long_columns"}),
    "the last tile's dV moved": (WIDE.but(seqlen_kv=(1 << 16) + 100), moved_dv, {"long_columns"}),
    "dV moved, gathered": (
        WIDE.but(distribution="gather_integers", seqlen_q=64, seqlen_kv=225),
        moved_dv,
        {"gather_backward"},
    ),
    "140 rows past 65535 lost": (
        TALL.but(distribution="gather_integers"),
        rows_dropped(1 << 16),
        {"gather_backward"},
    ),
    "LSE and O of rows past 65535 wrap": (TALL, delta_wraps, {"long_columns"}),
}


@pytest.mark.parametrize("name", tier.for_ci(FAULTS, keep=2))
def test_a_fault_is_convicted(name: str) -> None:
    problem, kernel, by = FAULTS[name]
    assert by <= {
        oracle
        for oracle, ruling in heard(tried(problem, kernel)).items()
        if ruling.finding is not None
    }


def test_a_wrong_forward_excuses_nothing() -> None:
    trial = tried(WIDE)
    saved = trial.saved.outputs["lse"]
    saved[0, 0, 2] += 0.5
    convicted(long_columns.judge(trial), "saved lse is off by 0.5")


SHAPE = {
    "batch": 2,
    "heads_q": 4,
    "heads_kv": 2,
    "seqlen_q": 130,
    "seqlen_kv": 150,
    "head_dim": 16,
    "dtype": "float16",
}


@pytest.mark.parametrize("score_mod", [None, Softcap(2.0)], ids=str)
@pytest.mark.parametrize(
    "mask", [Full(), Causal(), Window(3, 9), Lengths((130, 40), (150, 0))], ids=lambda m: m.name
)
def test_chosen_gradients_are_those_of_the_whole(mask: Mask, score_mod: ScoreMod | None) -> None:
    """Where the forward saved exact results: nominal gradients are the exact ones, bounds those of
    all rows and keys."""
    p = Problem(**SHAPE, mask=mask, score_mod=score_mod)
    trial = trial_of(p)
    exact = attention.forward(*trial.expanded, attention.Attention(p.mask, p.scale, p.score_mod))
    given = Given(*trial.expanded, trial.dout, exact.out, exact.lse)
    a = resolve(flat_gradients(group="cast"), Config(block_m=32, block_n=32), p, "sm_90")
    whole = backward.gradient_truth(p, *trial.expanded, trial.dout, exact.out, exact.lse, a)
    rows, keys = torch.tensor([129, 0, 64, 7]), torch.tensor([3, 149, 64, 65, 0])
    for chosen in (row_gradients(p, given, a, rows), *column_gradients(p, given, a, keys)):
        want, bound = getattr(whole, chosen.name), getattr(whole, f"{chosen.name}_bound")
        torch.testing.assert_close(chosen.want, want[:, :, chosen.at], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(chosen.bound, bound[:, :, chosen.at], rtol=1e-6, atol=1e-9)


def test_nothing_is_asked_of_what_is_not_finite() -> None:
    """A NaN that was saved reaches its row of dQ and the keys of its head, hidden ones too, since
    -inf less NaN is NaN: the bound is infinite there, and nowhere else."""
    p = Problem(**SHAPE, mask=Causal())
    trial = trial_of(p)
    exact = attention.forward(*trial.expanded, attention.Attention(p.mask, p.scale))
    lse = exact.lse.clone()
    lse[1, 2, 50] = torch.nan
    a = resolve(GradientNumerics(), Config(), p, "sm_90")
    given = Given(*trial.expanded, trial.dout, exact.out, lse)
    dq = row_gradients(p, given, a, torch.tensor([49, 50]))
    assert bool(dq.bound[1, 2, 1].isinf().all())
    assert int(dq.bound.isinf().sum()) == p.head_dim
    dk, dv = column_gradients(p, given, a, torch.tensor([70, 71]))  # row 50 sees keys up to 70
    for one in (dk, dv):
        assert bool(one.bound[1, 1].isinf().all())
        assert int(one.bound.isinf().sum()) == 2 * p.head_dim
    assert len(positions(p, "keys")) == 96
