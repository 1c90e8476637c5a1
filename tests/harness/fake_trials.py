"""Trials without a cell: their launches are made from the fp64 reference, with planted faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from references.masks import Lengths
from verify.cell.arena import Arena
from verify.cell.process import Cell, Reply
from verify.evidence import Finding
from verify.judging.findings import Ruling
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.problem import Problem
from verify.variant import Config, Contract, Declaration, Numerics, Support

torch.set_num_threads(1)

DECLARED = Declaration(
    ref="kernel",
    path="kernel.py",
    source_hash="",
    name="kernel",
    family="torch",
    configs=(Config(block_n=32),),
    support=Support(
        dtypes=("float16", "float32"),
        head_dims=range(8, 65),
        masks=("full", "causal", "lengths", "window"),
        intersections=True,
        grouped_heads=True,
    ),
    numerics=Numerics(),
    contract=Contract(),
)
OK = Reply("ok")
SHAPE = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seqlen_q": 6, "seqlen_kv": 9, "head_dim": 16}
PLAIN = Problem(**SHAPE, dtype="float32", seed=3)
EMPTY = PLAIN.but(mask=Lengths((6, 2), (9, 0)))  # sequence 1 sees nothing


def trial_of(problem: Problem, contract: Contract | None = None, **changes: object) -> Trial:
    """A trial without cell or arena; the test sets its launches."""
    declaration = replace(DECLARED, contract=contract or DECLARED.contract, **changes)
    return Trial(
        declaration, declaration.configs[0], problem, cast(Cell, None), cast(Arena, None), "cpu"
    )


def right_run(trial: Trial, poison: str = "nan") -> Launch:
    """The launch of a perfect kernel, in its dtype and by its contract."""
    truth, contract = trial.truth, trial.declaration.contract
    lse = truth.lse / math.log(2) if contract.lse == "base2" else truth.lse
    lse = lse.masked_fill(truth.empty, contract.empty_row_lse).float() if contract.lse else None
    out = truth.out.masked_fill(truth.empty[..., None], contract.empty_row_out).to(
        trial.problem.format_out.torch
    )
    return Launch(OK, poison, {"out": out} | ({} if lse is None else {"lse": lse}))


def tried(
    problem: Problem, plant: Callable[[Tensor, Tensor], None] | None = None, **changes: object
) -> Trial:
    """A trial whose first launch is right, except for the changes that `plant(out, lse)` makes."""
    trial = trial_of(problem, **changes)
    run = right_run(trial)
    if plant is not None:
        assert run.out is not None
        plant(run.out, run.lse if run.lse is not None else torch.empty(0))
    trial.launches["first"] = run
    return trial


def convicted(ruling: Ruling, *words: str) -> Finding:
    """The ruling's finding; asserts that there is one, with these words in its message."""
    assert ruling.finding is not None, "not convicted"
    for word in words:
        assert word in ruling.finding.message
    return ruling.finding


def acquitted(ruling: Ruling) -> bool:
    return ruling.finding is None
