"""Declared numerics: probes test accumulators, score roundings, prescaling, P's format, row sum and
exponential against the declaration.

The inputs are fixed problems that each show one claim of `Numerics`: a narrow accumulator, P of
another format, rounded scores, a coarse exponential. A claim is false if the result exceeds the
bound of the declared word and another word fits better; the finding names the claim and the word
that fits. A false claim hides some others, which are then not tested: scores that are summed in too
few bits show nothing about the rounding of scores. The kernel must support rows that see all keys.

Premises: the probes' scores are their designed products (linear_scores, position_free_scores),
added before any factor (factors_by_head); only their weights are added up (visible_mass_only,
rows_average_values); O is rounded once (exact_output).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from references.premises import Premise
from verify.evidence import Finding
from verify.judging.findings import Ruling
from verify.judging.measuring import UNDECIDED, SpoiledError, probe_problem
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.oracles.numerics import accumulator, probability, scores
from verify.oracles.numerics.hypotheses import Claim
from verify.problem import Problem
from verify.problem.refusal import fewest_heads
from verify.variant import Declaration

_LENGTH = 64


def judge(trial: Trial) -> Ruling:
    """Convict the kernel of every claim that a probe shows to be false."""
    try:
        found = list(_claims(trial))
    except SpoiledError as spoiled:
        return spoiled.ruling
    false = [claim for claim in found if claim.false]
    finding = None
    if false:
        message = "; ".join(
            f"declares {c.name} {c.declared}; behaves like {c.word} ({c.ratio:.3g} times the bound:"
            f" {c.evidence})"
            for c in false
        )
        finding = Finding(
            oracle="declared_numerics",
            message=message,
            got=false[0].word,
            bound=false[0].declared,
            where=false[0].name,
        )
    words = {claim.name: claim.word for claim in found} | {
        f"{claim.name}:declared": claim.declared for claim in found
    }
    words |= {f"{claim.name}:contradicts": claim.evidence for claim in false}
    return Ruling(finding, {f"r {claim.name}": claim.ratio for claim in found}, words)


def _claims(trial: Trial) -> Iterator[Claim]:
    """Yield each claim once, without those that an earlier false claim hides."""
    sums = accumulator.scores(trial)
    if sums is not None:
        yield sums
    if sums is None or not sums.false:
        rounding = scores.rounding(trial)
        if rounding is not None:
            yield rounding
        if rounding is None or not rounding.false:
            operands = scores.prescaling(trial)
            if operands is not None:
                yield operands
    products = accumulator.values(trial)
    if products is not None:
        yield products
    rows = probability.rows_of(trial)
    if rows is not None:
        yield from _weights(trial, rows)


def _weights(trial: Trial, rows: probability.Rows) -> Iterator[Claim]:
    """Yield the claims on the row sum, on the exponential if the row sum does not hide it, and on
    P's format.

    The LSE shows the exponential separately from P.  Without an LSE, a format that explains the
    rows is blamed first, then the exponential, then P without a format.
    """
    total = probability.row_sum(trial, rows)
    if total is not None:
        yield total
    hidden = total is not None and total.word != probability.BEFORE
    measured = None if hidden else probability.exponential(trial, rows)
    alone = rows.probe.first.lse is not None
    claim = probability.probability(
        trial, rows, measured[1] if measured is not None and alone else 0.0
    )
    if measured is not None and measured[0].false and claim.word == probability.NONE:
        claim = replace(claim, word=UNDECIDED, worse=False)
    yield claim
    if measured is not None and (alone or not claim.false):
        yield measured[0]


def asks(declaration: Declaration, dtype: str) -> list[Problem]:
    """Return one problem per build that computes differently, or one in all for an interpreted
    kernel.  The probes run beside it."""
    support = declaration.support
    buckets = (64,) if declaration.interpreted else (64, *declaration.head_dim_buckets)
    heads = {"heads_q": fewest_heads(support), "heads_kv": 1}
    shape = {"batch": 1, **heads, "seqlen_q": _LENGTH, "seqlen_kv": _LENGTH}
    problems = {
        probe_problem(declaration, dtype, head_dim=bucket, **shape).head_dim: bucket
        for bucket in buckets
    }
    found = [
        probe_problem(declaration, dtype, head_dim=bucket, **shape) for bucket in problems.values()
    ]
    return [problem for problem in found if support.refusal(problem) is None]


GROUP = Group(
    name="declared_numerics",
    about="inputs that show a false claim about the arithmetic",
    asks=asks,
)

ORACLE = Oracle(
    name="declared_numerics",
    group="declared_numerics",
    catches=(
        "an accumulator, score, P, row sum or exponential of less precision than declared,"
        " undeclared prescaling of operands"
    ),
    judge=judge,
    excludes=lambda declaration: (
        None if "full" in declaration.support.masks else "no support for rows that see all keys"
    ),
    needs=frozenset(
        {
            Premise.LINEAR_SCORES,
            Premise.POSITION_FREE_SCORES,
            Premise.FACTORS_BY_HEAD,
            Premise.VISIBLE_MASS_ONLY,
            Premise.ROWS_AVERAGE_VALUES,
            Premise.EXACT_OUTPUT,
        }
    ),
)
