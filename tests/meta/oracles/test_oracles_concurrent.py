"""Launches at once: the oracle tells what they share from what each has of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from tests.harness.fake_trials import DECLARED, PLAIN, acquitted, convicted, right_run, trial_of
from verify.bundle import ROOT
from verify.cell.arena import Arena, Damage, bits, side_name
from verify.cell.concurrent import LAUNCHES
from verify.cell.discovery import roster
from verify.cell.process import PLAIN_CPU, PLAIN_CUDA, Cell, ForkServer, Reply
from verify.judging.launch import Launch
from verify.judging.run_checks import execution
from verify.judging.trial import Trial
from verify.oracles import concurrent, of_group
from verify.problem import Problem
from verify.variant import Contract

torch.set_num_threads(1)

PROBLEM = Problem(seqlen_q=4, seqlen_kv=5, head_dim=8, dtype="float32", seed=1)
Change = Callable[[Launch], Launch]


def judged(
    change: Change = lambda run: run, held: object = True, lone: Change = lambda run: run
) -> Trial:
    """A trial whose launches at once came back so, and that over negated inputs alone."""
    trial = trial_of(PLAIN)
    trial.launches["first"] = right_run(trial)
    trial.launches["negated"] = lone(right_run(trial))
    run = right_run(trial)
    sides = {
        side_name(i, name): tensor for i in range(LAUNCHES) for name, tensor in run.outputs.items()
    }
    trial.launches["concurrent"] = change(
        replace(run, reply=Reply("ok", data={"held": held}), outputs=sides)
    )
    return trial


def flipped(name: str) -> Change:
    """One bit of an output is another."""

    def change(run: Launch) -> Launch:
        tensor = run.outputs[name].clone()
        bits(tensor).view(-1)[100] ^= 1
        return replace(run, outputs={**run.outputs, name: tensor})

    return change


def test_the_same_bits_are_right() -> None:
    ruling = concurrent.judge(judged())
    assert acquitted(ruling)
    assert ruling.measures == {"concurrent_held": 1.0}
    assert concurrent.judge(judged(held=False)).measures == {"concurrent_held": 0.0}


@pytest.mark.parametrize("launch", range(LAUNCHES))
def test_one_bit_of_one_launch_is_convicted(launch: int) -> None:
    finding = convicted(
        concurrent.judge(judged(flipped(side_name(launch, "out")))),
        "beside 3 other launches",
        "1 of 768 elements differ",
    )
    assert finding.where.startswith("out[b=0, h=")


def test_a_reply_convicts_and_acquits_nobody() -> None:
    """A kernel's code runs in the process that answers: what the answer says of the numbers is not
    heard."""
    forged = {"differing": {"out": 0, "lse": 0}, "held": True}
    wrong = judged(
        lambda run: replace(flipped(side_name(2, "out"))(run), reply=Reply("ok", data=forged))
    )
    assert not acquitted(concurrent.judge(wrong))
    right = judged(lambda run: replace(run, reply=Reply("ok", data={"differing": {"out": 3}})))
    assert acquitted(concurrent.judge(right))


def test_what_every_run_must_hold_is_asked_of_these_too() -> None:
    crash = judged(lambda run: Launch(Reply("crash", "killed by SIGSEGV"), "nan"))
    assert convicted(concurrent.judge(crash), "SIGSEGV").oracle == "execution"
    damaged = judged(
        lambda run: replace(
            run, damage=Damage("redzone", "3 bytes past the end of launch 1: out", 3)
        )
    )
    assert convicted(concurrent.judge(damaged), "3 bytes past").oracle == "memory"
    lone = judged(lone=lambda run: Launch(Reply("raised", "no"), "nan"))
    assert convicted(concurrent.judge(lone), "raises").oracle == "execution"


def test_memory_that_other_processes_hold_convicts_nobody() -> None:
    full = judged(lambda run: Launch(Reply("out of memory", "CUDA out of memory"), "nan"))
    ruling = concurrent.judge(full)
    assert acquitted(ruling)
    assert ruling.measures == {"concurrent_held": 0.0}
    assert not acquitted(execution(full, full.concurrent)), "alone it would be"


def test_it_is_asked_on_cuda_of_some_cases_of_who_promises_to_repeat() -> None:
    for group, field_name in (
        ("accuracy", "deterministic"),
        ("gradients", "deterministic_backward"),
    ):
        (oracle,) = (oracle for oracle in of_group(group) if oracle.name == "concurrent")
        assert oracle.excludes(DECLARED) is None
        promised = Contract(**{field_name: False})
        assert oracle.excludes(replace(DECLARED, contract=promised)) == "declared not deterministic"
    (oracle,) = (oracle for oracle in of_group("accuracy") if oracle.name == "concurrent")

    def asked(problem: Problem, environment: object = PLAIN_CUDA, number: int = 0) -> bool:
        trial = trial_of(problem)
        trial.number = number
        trial.cell = cast(Cell, SimpleNamespace(environment=environment))
        return oracle.concerns(trial)

    assert sum(asked(PLAIN.but(seed=seed)) for seed in range(64)) == 8
    assert asked(PLAIN.but(seed=8))
    assert [asked(PLAIN.but(seed=8), number=n) for n in range(64)].count(True) == 2
    assert not asked(PLAIN.but(seed=8), PLAIN_CPU)
    assert not asked(PLAIN.but(seed=8, seqlen_q=1 << 17)), (
        "as many copies as launches would take too much memory"
    )


# On a GPU.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: there are no streams")
def test_kernels_that_share_a_buffer_are_convicted_on_a_gpu_and_their_twins_pass() -> None:
    file = ROOT / "tests" / "sample_kernels" / "shares_scratch.py"
    fork_server, arena = ForkServer(PLAIN_CUDA), Arena()
    (oracle,) = (oracle for oracle in of_group("accuracy") if oracle.name == "concurrent")
    try:
        for declaration in roster([file]).declarations:
            cell, rulings = Cell(fork_server), []
            for seed in (8, 16):  # the first time each stream still allocates
                problem = PROBLEM.but(
                    heads_q=2,
                    heads_kv=2,
                    seqlen_q=40,
                    seqlen_kv=70,
                    head_dim=32,
                    head_dim_v=32,
                    seed=seed,
                )
                trial = Trial(
                    declaration, declaration.configs[0], problem, cell, arena, cell.arch()
                )
                assert acquitted(execution(trial, trial.first))
                assert oracle.concerns(trial)
                rulings.append(oracle.judge(trial))
            cell.close()
            assert all(map(acquitted, rulings)) is (declaration.name == "own-scratch"), rulings
    finally:
        arena.close()
        fork_server.close()
