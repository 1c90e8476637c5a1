"""Contract: what a kernel promises, measured on designed problems from raw outputs, and compared
with what it declares."""

from __future__ import annotations

from collections.abc import Iterator

from references.masks import Causal, Full, Lengths, Mask, Window
from verify.judging.findings import Ruling
from verify.judging.measuring import SpoiledError, open_mask, probe_problem, ruling_of
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.oracles.contract import empty_rows, heads, invariance, lse, softcap, special, visibility
from verify.problem import Problem
from verify.variant import Declaration

_PROPERTIES = (lse, empty_rows, visibility, softcap, special, heads, invariance)
_CAP = 2.0


def judge(trial: Trial) -> Ruling:
    """Every property that the problem can show."""
    try:
        found = [measured for one in _PROPERTIES for measured in one.measure(trial)]
    except SpoiledError as spoiled:
        return spoiled.ruling
    return ruling_of("contract", found)


def asks(declaration: Declaration, dtype: str) -> list[Problem]:
    """Problems on which contracts show; what lies outside the support is not asked."""
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
        cap: float = 0.0,
    ) -> Problem:
        shape = {
            "batch": batch,
            "heads_q": heads * groups,
            "heads_kv": heads,
            "seqlen_q": seqlen_q,
            "seqlen_kv": seqlen_kv,
        }
        return probe_problem(declaration, dtype, **shape, mask=mask, softcap=cap)

    yield made(5, 75, open_mask(support), batch=2 if declaration.interpreted else 3, heads=2)
    # Every alignment on a shape that tells it from the other, and with rows that see nothing beside
    # rows that do.
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
    yield made(7, 30, Full(), cap=_CAP)
    yield made(
        7,
        30,
        Lengths((7, 7), (30, 12)) if "lengths" in support.masks else Causal(),
        batch=2,
        cap=_CAP,
    )


GROUP = Group(
    name="contract",
    about="designed problems on which promises beyond numbers show in raw outputs",
    asks=asks,
)

ORACLE = Oracle(
    name="contract",
    group="contract",
    catches=(
        "an LSE of another base, other contents of empty rows, alignment, window ends, order of the"
        " softcap, NaN that is lost or reaches rows which do not read it, other bits in another run"
        " or batch, all against what is declared"
    ),
    judge=judge,
)
