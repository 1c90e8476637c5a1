"""FPSan: Triton's sanitizer of floating-point algebra, as a tool like the others.

Triton builds a kernel in which every number is an integer, and every operation on numbers one on
integers: sums and products modulo 2^w, 2^(a + b) = 2^a 2^b, a maximum by the integers' order.  So
two kernels that compute the same by other tiles, in another order or with other rescaling agree in
every bit, and a wrong operand, scale, block or factor changes bits.  Here each kernel is compared
with a plain one (tests/planted/plain.py), built likewise, in the same process.

Cutting a number to w bits is a cut modulo 2^w, which sums and products commute with.  So P in 16
bits and O in 16 bits agree for all tiles.  What does not agree though both are right, and is left
out (`excludes`, `comparable`):

- 2^-inf is not 0.  A forward that visits a key that a row does not see adds a number that depends
  on its tiles.  Such problems are not compared; a backward sets P to 0 there.
- 2^(log2 l) is not l: parts of a softmax are not merged.
- P in 8 bits, rescaled, is known modulo 2^8 alone.
- An atomic addition is left as it is: it adds the integers as floating-point numbers.
- A product of matrices is computed by each CTA in memory of its own: a tile that is split over a
  cluster is not whole there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from references.masks import Causal, Full, Mask
from verify.bundle import ROOT
from verify.cell.arena import Arena
from verify.cell.discovery import roster
from verify.cell.process import Cell
from verify.judging.run_checks import execution, memory
from verify.judging.trial import Trial
from verify.problem import Problem
from verify.problem.case import Case
from verify.sanitizers import binaries
from verify.sanitizers.binaries import Built
from verify.sanitizers.bits import difference
from verify.sanitizers.facts import CaseResult, Facts, Judgement, case_doubts
from verify.sanitizers.records import Record
from verify.sanitizers.session import Subject
from verify.sanitizers.tool import FPSAN
from verify.variant import Declaration

PLAIN = ROOT / "tests" / "planted" / "plain.py"
KIND = "Algebra"  # of a record
_WHOLE = 128  # keys; blocks of the collection's kernels divide it
_SIXTEEN = ("float16", "bfloat16", "float32")


def excludes(declaration: Declaration) -> str | None:
    """Why a variant is not compared with the plain kernel, or None."""
    if declaration.family not in ("gluon", "triton"):
        return "the plain kernel under FPSan has the algebra of the collection's Triton kernels"
    if _ctas(declaration) > 1:
        return (
            "FPSan of Triton 3.8 computes a product of matrices in memory of each CTA, where a tile"
            " that is split over a cluster is not whole"
        )
    if not set(declaration.support.dtypes) & set(_SIXTEEN):
        return "P has 8 bits, and sums of it that are rescaled agree under FPSan in 8 bits alone"
    if any("split" in dict(config.options) for config in declaration.configs):
        return "it merges parts by their LSE, and 2^(log2 l) is not l under FPSan"
    declared = declaration.gradients
    if declared is not None and declared.sums.atomics:
        return "FPSan leaves atomic additions as they are"
    if declared is not None and declared.products.prescale != "none":
        return "K is scaled and rounded before the products, and the plain kernel's is not"
    return None


def _ctas(declaration: Declaration) -> int:
    return max((int(dict(c.options).get("ctas", 1)) for c in declaration.configs), default=1)


def comparable(declaration: Declaration, problem: Problem) -> bool:
    """Whether a right kernel and the plain one agree in every bit on that problem."""
    if problem.score_mod is not None or problem.dtype not in _SIXTEEN:
        return False
    if "backward" in declaration.entries:
        # The LSE that it reads can be of any numbers; its own P is 0 where a key is not seen.
        return problem.seqlen_q > 0 < problem.seqlen_kv
    return isinstance(problem.mask, Full) and problem.seqlen_kv % _WHOLE == 0 < problem.seqlen_kv


def problems(declaration: Declaration, dtype: str) -> tuple[Problem, ...]:
    """Problems with grouped heads and a ragged tile of rows where they are supported; of whole
    blocks of keys for a forward.

    Those of a backward are smaller: it has three kernels, and the plain one multiplies every tile
    of rows with every tile of keys four times.
    """
    support = declaration.support
    shapes: tuple[tuple[int, int, int, Mask], ...]
    if "backward" in declaration.entries:
        second: Mask = Causal() if "causal" in support.masks else Full()
        shapes = ((16, 75, 160, Full()), (32, 75, 160, second))
    else:
        shapes = ((64, 203, 384, Full()), (48, 128, 256, Full()))
    return tuple(
        Problem(
            heads_q=2,
            heads_kv=1 if support.grouped_heads else 2,
            seqlen_q=seqlen_q,
            seqlen_kv=seqlen_kv,
            head_dim=head_dim,
            dtype=dtype,
            mask=mask,
            seed=seed,
        )
        for seed, (head_dim, seqlen_q, seqlen_kv, mask) in enumerate(shapes, 1)
        if head_dim in support.head_dims
    )


def plain_of(declaration: Declaration) -> Declaration:
    """The declaration of the plain kernel that a variant is compared with."""
    lse = declaration.contract.lse or "natural"
    backward = "backward" in declaration.entries
    name = "plain-backward" if backward else f"plain-forward-{lse}"
    return next(each for each in _plain() if each.name == name)


@cache
def _plain() -> tuple[Declaration, ...]:
    return roster([PLAIN]).declarations


def compare(
    case: Case, subject: Subject, cell: Cell, arena: Arena
) -> tuple[CaseResult, Record | None]:
    """Run a case and the plain kernel on it, and compare bits; the record says where they
    differ."""
    trial = Trial(
        subject.declaration,
        subject.config,
        case.problem,
        cell,
        arena,
        arch="",
        entry=subject.entry,
    )
    if against := _fails(trial):
        return CaseResult(case.id, trial.first.reply.status, against), None
    plain = plain_of(subject.declaration)
    beside = replace(
        trial,
        declaration=plain,
        config=plain.configs[0],
        notes={},
        launches={"saved": trial.saved} if subject.entry == "backward" else {},
        _plans={},
        _beside={},
    )
    if against := _fails(beside):
        return CaseResult(case.id, beside.first.reply.status, f"the plain kernel: {against}"), None
    told = difference(trial.first.outputs, beside.first.outputs, "the plain kernel")
    if not told:
        return CaseResult(case.id, "ok"), None
    text = f"under FPSan {told}"
    return CaseResult(case.id, "ok"), Record(tool=FPSAN, kind=KIND, text=text, words=text)


def _fails(trial: Trial) -> str:
    """Why the numbers of a trial cannot be used, or "".

    Under FPSan any bits can be right, those of poison too.  So it runs over two kinds of poison:
    what is equal in both runs was written.
    """
    runs = [trial.saved] if trial.entry == "backward" else []
    for run in (*runs, trial.first, trial.run("again", poison="huge")):
        ruling = execution(trial, run)
        if ruling.finding is None and run.damage is not None:
            ruling = memory(trial, run)
        if ruling.finding is not None:
            return ruling.finding.message
    again = trial.run("again", poison="huge").outputs
    told = difference(again, trial.first.outputs, "a run before, over other poison")
    return f"two runs under FPSan differ: {told}" if told else ""


def judged(facts: Facts, built: Sequence[Built] | None) -> Judgement:
    """The judgement that follows from the facts and from the process's builds.  Bits that differ
    count only where nothing else is in doubt: without instrumentation right kernels differ, too."""
    records = facts.records or ()
    doubts = list(facts.doubts)
    if facts.exit_code != 0:
        code = "a kill" if facts.exit_code is None else f"exit code {facts.exit_code}"
        doubts.append(f"it ended with {code}")
    doubts += case_doubts(facts)
    if facts.counted:
        doubts += binaries.doubts(None if built is None else tuple(built), FPSAN)
    if doubts:
        return Judgement("inconclusive", tuple(doubts), records, len(records))
    return Judgement("faulty" if records else "clean", (), records, len(records))
