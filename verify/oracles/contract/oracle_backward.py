"""Backward contract: repetition, batch invariance and gradients of empty rows, measured on designed
problems."""

from __future__ import annotations

from references.masks import Causal, Lengths
from verify.judging.findings import Ruling
from verify.judging.measuring import (
    Measured,
    SpoiledError,
    number,
    open_mask,
    plain,
    probe_problem,
    ruling_of,
)
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.oracles.contract import invariance
from verify.problem import Problem
from verify.variant import Declaration


def judge(trial: Trial) -> Ruling:
    """Every property that the problem can show."""
    try:
        found = _invariance(trial) + _empty(trial)
    except SpoiledError as spoiled:
        return spoiled.ruling
    return ruling_of("contract_backward", found)


def _invariance(trial: Trial) -> list[Measured]:
    if not plain(trial):
        return []
    return [
        invariance.repetition(
            trial, trial.declaration.contract.deterministic_backward, "gradients, repetition"
        )
    ]


def _empty(trial: Trial) -> list[Measured]:
    """dQ of rows that see nothing, dK and dV of keys that nobody sees."""
    p = trial.problem
    seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
    read = seen.any(2).view(p.batch, p.heads_kv, p.group, p.seqlen_kv).any(2)
    empty = {"dq": ~seen.any(-1), "dk": ~read, "dv": ~read}
    found = []
    for name, gradient in trial.first.outputs.items():
        values = gradient[empty[name]].double().flatten()
        if not values.numel():
            continue
        odd = values[~(values == 0)]
        word = number(float(odd[0])) if len(odd) else "0"
        evidence = f"{p.mask.name}: {len(odd)} of {len(values)} elements"
        what = f"{name} of {'empty rows' if name == 'dq' else 'keys that nobody sees'}"
        found.append(
            Measured(
                name=what, word=word, declared="0", contradicts=bool(len(odd)), evidence=evidence
            )
        )
    return found


def asks(declaration: Declaration, dtype: str) -> list[Problem]:
    """Problems on which a backward's contracts show; what lies outside the support is not asked."""
    support = declaration.support
    heads = {"heads_q": 4, "heads_kv": 2 if support.grouped_heads else 4}
    problems = [
        probe_problem(
            declaration, dtype, batch=2, **heads, seqlen_q=40, seqlen_kv=75, mask=open_mask(support)
        ),
        probe_problem(
            declaration, dtype, batch=1, **heads, seqlen_q=11, seqlen_kv=6, mask=Causal()
        ),
        probe_problem(
            declaration, dtype, batch=1, **heads, seqlen_q=6, seqlen_kv=11, mask=Causal("tl")
        ),
        probe_problem(
            declaration,
            dtype,
            batch=2,
            **heads,
            seqlen_q=7,
            seqlen_kv=20,
            mask=Lengths((7, 5), (13, 0)),
        ),
    ]
    return [problem for problem in problems if support.refusal(problem) is None]


GROUP = Group(
    name="contract_backward",
    about="designed problems on which a backward's promises beyond numbers show",
    entry="backward",
    asks=asks,
)

ORACLE = Oracle(
    name="contract_backward",
    group="contract_backward",
    catches=(
        "other bits of gradients in another run, against the declaration; garbage for empty rows"
        " and hidden keys"
    ),
    judge=judge,
)
