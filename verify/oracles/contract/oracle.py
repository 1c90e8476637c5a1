"""Contract: the behaviour of a kernel on designed problems, measured from raw outputs, agrees with
its declared contract.

The designed problems show promises other than accuracy: base and scale of LSE, empty rows,
alignment, window ends, the order of softcap and mask, NaN, repetition, batch invariance. Each is
measured and then compared with the declaration. If the declared arithmetic is too coarse to tell
the declared behaviour from another one, nothing contradicts it.

A NaN that a row reads must reach its result (`nan = "propagates"`, the default): a NaN in Q or K
makes all of the row's O and its LSE NaN, a NaN in V makes that column NaN. Three faults hide it: a
maximum that ignores NaN, a clamp that turns it into a number, and `sum > 0` instead of `sum != 0`
as the test for an empty row. `"out"` promises O alone: FlashAttention-2 gives such a row an LSE of
+inf. The effect of infinities is recorded, not judged. Rows that read neither must stay finite.

A kernel that supports only causal masks is judged under one: rows that see no key show nothing
about the base of LSE, and a NaN in their query has no effect.

If a problem, or the declared arithmetic, breaks a premise of a property (`NEEDS` in its file), that
property is not measured.

Backward: repetition, and gradients of empty rows: dQ of rows that see no key, and dK and dV of keys
that no row sees, are 0. gradient_slice judges batch invariance of gradients.

Premises: none for the contract as a whole. The gradients need hidden_has_no_effect: a key that no
row sees has no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

from references.masks import Causal, Full, Lengths, Mask, Window
from references.premises import Premise
from references.score_mods import ScoreMod, Softcap
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
from verify.oracles.contract import empty_rows, heads, invariance, lse, softcap, special, visibility
from verify.problem import Problem
from verify.problem.premises import broken, broken_by, without_broken
from verify.variant import Declaration

_PROPERTIES = (lse, empty_rows, visibility, softcap, special, heads, invariance)
_CAP = Softcap(2.0)


def judge(trial: Trial) -> Ruling:
    """Measure every property that the problem can show; only the softcap, if the problem has a
    feature that the support does not require."""
    p = trial.problem
    plainest = without_broken(None, p, trial.declaration.support) == p
    asked = [one for one in _PROPERTIES if plainest or one is softcap]
    try:
        found = [
            measured
            for one in asked
            if broken(one.NEEDS, p) is None
            and broken_by(one.NEEDS, trial.declaration.numerics.quantised) is None
            for measured in one.measure(trial)
        ]
    except SpoiledError as spoiled:
        return spoiled.ruling
    return ruling_of("contract", found)


def asks(declaration: Declaration, dtype: str) -> list[Problem]:
    """Return the problems, inside the support, that show contracts."""
    return [
        problem
        for problem in _problems(declaration, dtype)
        if declaration.support.refusal(problem) is None
    ]


def _problems(declaration: Declaration, dtype: str) -> Iterator[Problem]:
    support = declaration.support
    groups = 2 if support.grouped_heads else 1

    def made(
        seqlen_q: int,
        seqlen_kv: int,
        mask: Mask,
        *,
        batch: int = 1,
        heads: int = 1,
        mod: ScoreMod | None = None,
    ) -> Problem:
        shape = {
            "batch": batch,
            "heads_q": heads * groups,
            "heads_kv": heads,
            "seqlen_q": seqlen_q,
            "seqlen_kv": seqlen_kv,
        }
        return probe_problem(declaration, dtype, **shape, mask=mask, score_mod=mod)

    yield made(5, 75, open_mask(support), batch=2 if declaration.interpreted else 3, heads=2)
    # Each alignment gets a shape that tells it from the other, with empty and live rows.
    for alignment in ("br", "tl"):
        causal = Causal(alignment)
        yield made(6, 11, causal)
        yield made(11, 6, causal)
        yield made(6, 11, Window(3, 1, alignment))
    if not support.cross_lengths or "causal.square" in support.masks:
        yield made(9, 9, Causal())
    yield made(150, 6, Causal())  # tiles without any key
    yield made(5, 40, Lengths((5, 5), (33, 0)), batch=2)
    if support.min_seqlen == 0:
        yield made(5, 0, Full())
    yield made(7, 30, Full(), mod=_CAP)
    yield made(
        7,
        30,
        Lengths((7, 7), (30, 12)) if "lengths" in support.masks else Causal(),
        batch=2,
        mod=_CAP,
    )


def judge_backward(trial: Trial) -> Ruling:
    """Measure every property of gradients that the problem can show."""
    try:
        found = _gradient_repetition(trial) + _empty_gradients(trial)
    except SpoiledError as spoiled:
        return spoiled.ruling
    return ruling_of("contract_backward", found)


def _gradient_repetition(trial: Trial) -> list[Measured]:
    if not plain(trial):
        return []
    return [
        invariance.repetition(
            trial, trial.declaration.contract.deterministic_backward, "gradients, repetition"
        )
    ]


def _empty_gradients(trial: Trial) -> list[Measured]:
    """Measure dQ of rows that see no key, and dK and dV of keys that no row sees."""
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
        what = f"{name} of {'empty rows' if name == 'dq' else 'keys that no query sees'}"
        found.append(
            Measured(
                name=what, word=word, declared="0", contradicts=bool(len(odd)), evidence=evidence
            )
        )
    return found


def asks_backward(declaration: Declaration, dtype: str) -> list[Problem]:
    """Return the problems, inside the support, that show contracts of a backward."""
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


GROUPS = (
    Group(
        name="contract",
        about="designed problems whose raw outputs show promises other than accuracy",
        asks=asks,
        first_look="variant",
    ),
    Group(
        name="contract_backward",
        about="designed problems that show a backward's promises other than accuracy",
        entry="backward",
        asks=asks_backward,
        first_look="variant",
    ),
)

FORWARD = Oracle(
    name="contract",
    group="contract",
    catches=(
        "results that contradict the declared contract: base of LSE, contents of empty rows,"
        " alignment, window ends, order of the softcap, NaN that is lost or reaches rows that do"
        " not read it, other bits in another run or batch"
    ),
    judge=judge,
    needs=frozenset(),
)

BACKWARD = Oracle(
    name="contract_backward",
    group="contract_backward",
    catches=(
        "other bits of gradients in another run, if the contract promises equal bits; garbage for"
        " empty rows and hidden keys"
    ),
    judge=judge_backward,
    needs=frozenset({Premise.HIDDEN_HAS_NO_EFFECT}),
)

ORACLES = (FORWARD, BACKWARD)
