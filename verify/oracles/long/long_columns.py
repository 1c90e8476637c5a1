"""Long columns: chosen rows of dQ and chosen keys of dK and dV of a long sequence are within their
bounds.

The truth is the gradients that follow from the saved O and LSE. Chosen rows of dQ are sums over all
keys, chosen keys of dK and dV sums over all rows. The same functions as in gradient_bound
(`errors_of`, `rules_of`, `results`) compute their bounds from the same declaration, so every field
of `GradientNumerics` that matters there matters here. The forward's declaration matters only for
the saved O and LSE, which must be within their own bounds. A backward that computes its own softmax
is judged by gather_backward instead: the error of dK_j depends on the row sums of all rows.
docs/long-sequences.md says which rows and keys are chosen.

Premises: none, as for gradient_bound; gather_backward has the same premises as in its own group.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from verify.evidence import Finding
from verify.judging.findings import Ruling
from verify.judging.selected_positions import (
    Chosen,
    Given,
    column_gradients,
    positions,
    row_gradients,
)
from verify.judging.trial import Trial
from verify.judging.truth import on_device
from verify.oracles import Group, Oracle, gather
from verify.oracles.long.long_rows import judge_rows
from verify.oracles.long.problems import backward_problems
from verify.tolerance.gradients_arithmetic import resolve
from verify.variant import Declaration


def judge(trial: Trial) -> Ruling:
    """Check r <= 1 for every element of the chosen rows and keys.

    The saved O and LSE must be within their own bounds; a worse forward excuses no gradient.
    """
    p, declared = trial.problem, trial.declaration.gradients
    assert declared is not None
    finding, measures = judge_rows("long_columns", trial, trial.saved, "saved ")
    if finding is not None:
        return Ruling(finding, measures)
    a, rows, keys = (
        resolve(declared, trial.config, p, trial.arch),
        positions(p, "rows"),
        positions(p, "keys"),
    )
    heads = p.batch * p.heads_q * (p.head_dim + p.head_dim_v)
    products = 3.0 * heads * (len(rows) * p.seqlen_kv + len(keys) * p.seqlen_q)

    def compute(device: torch.device) -> list[Chosen]:
        given = Given(*(x.to(device) for x in (*trial.expanded, trial.dout, *trial.start)))
        return [row_gradients(p, given, a, rows), *column_gradients(p, given, a, keys)]

    found: Finding | None = None
    with trial.clock.timed("bound"):
        chosen = on_device(products, compute)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()  # gigabytes, which other workers on this device need
    for one in chosen:
        finding, measures[f"long_r_{one.name}"] = one.judge(
            "long_columns", trial.first.outputs[one.name]
        )
        found = found or finding
    return Ruling(found, measures)


def _applies(declaration: Declaration) -> str | None:
    declared = declaration.gradients
    if declared is None or declared.reads_out:
        return None
    what = (
        "makes its own softmax" if declared.softmax.source == "own" else "sums up D over its keys"
    )
    return f"{what}: what a key's column may be off by is a matter of all keys"


GROUP = Group(
    name="long_gradients",
    about=(
        "gradients of sequences past 131072: chosen rows and keys, and all of them if one key wins"
    ),
    entry="backward",
    asks=backward_problems,
    first_look="file",
    admits=lambda problem, support: True,  # the problems depend on the machine
)

ORACLES = (
    Oracle(
        name="long_columns",
        group="long_gradients",
        catches=(
            "rows or keys of a gradient past 15, 16 or 31 bits that are lost, doubled or confused"
            " with others"
        ),
        judge=judge,
        excludes=_applies,
        needs=frozenset(),
        concerns=lambda trial: trial.problem.distribution != "gather_integers",
        rank=20,
    ),
    replace(
        gather.BACKWARD,
        group="long_gradients",
        catches="rows and keys anywhere that are lost, doubled or confused: dV scatters dO",
        concerns=lambda trial: trial.problem.distribution == "gather_integers",
        rank=30,
    ),
)
