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
- P in 8 bits, rescaled, is known modulo 2^8 alone, and O has 16 bits.  But the sum of P is made
  before P is cut.  So the LSE of an 8-bit forward is compared with the plain kernel's, and its O
  with that of the same kernel in another config, of other rows and warps and the same blocks of
  keys, where every rescaling is the same.
- An atomic addition is left as it is: it adds the integers as floating-point numbers.
- A product of matrices is computed by each CTA in memory of its own: a tile that is split over a
  cluster is not whole there.
- The largest product times the scale is not the largest score: integers have another order.
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
from verify.problem.storage.transposed import TransposedV
from verify.sanitizers import binaries
from verify.sanitizers.binaries import Built
from verify.sanitizers.bits import difference
from verify.sanitizers.facts import CaseResult, Facts, Judgement, case_doubts
from verify.sanitizers.records import Record
from verify.sanitizers.session import Subject
from verify.sanitizers.tool import FPSAN
from verify.variant import Config, Declaration

PLAIN = ROOT / "tests" / "planted" / "plain.py"
KIND = "Algebra"  # of a record
_WHOLE = 128  # keys; blocks of the collection's kernels divide it
_SIXTEEN = ("float16", "bfloat16", "float32")
_EIGHT = ("float8_e4m3fn", "float8_e5m2")
_WIDE = 128  # rows of a config that is compared with one of half as many, and not twice


def excludes(declaration: Declaration) -> str | None:
    """Why a variant is not compared with the plain kernel, or None."""
    if declaration.family not in ("gluon", "triton"):
        return "the plain kernel under FPSan has the algebra of the collection's Triton kernels"
    if _ctas(declaration) > 1:
        return (
            "FPSan of Triton 3.8 computes a product of matrices in memory of each CTA, where a tile"
            " that is split over a cluster is not whole"
        )
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


def comparable(declaration: Declaration, config: Config, problem: Problem) -> bool:
    """Whether a right kernel with that config and the plain one agree in every bit on that
    problem."""
    if scales_behind_the_maximum(config):
        return False
    if problem.score_mod is not None or problem.dtype not in (*_SIXTEEN, *_EIGHT):
        return False
    if problem.descaling != "none" or problem.dtype_out in _EIGHT:
        return False  # factors, and the clamp of an 8-bit O, are not the plain kernel's
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
    chosen = [
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
    ]
    if TransposedV.word in support.storages:
        chosen = [replace(problem, layout_v=TransposedV()) for problem in chosen]
    return tuple(chosen)


def plain_of(declaration: Declaration) -> Declaration:
    """The declaration of the plain kernel that a variant is compared with."""
    lse = declaration.contract.lse or "natural"
    backward = "backward" in declaration.entries
    name = "plain-backward" if backward else f"plain-forward-{lse}"
    return next(each for each in _plain() if each.name == name)


@cache
def _plain() -> tuple[Declaration, ...]:
    return roster([PLAIN]).declarations


def scales_behind_the_maximum(config: Config) -> bool:
    """Whether a config of the collection runs a kernel that does: the Gluon turnstile."""
    return "turns" in dict(config.options)


def other_rows(config: Config) -> Config:
    """A config with other rows and warps, and the same blocks of keys."""
    rows, warps = config.block_m or _WIDE, config.num_warps or 4
    if rows >= _WIDE:
        return replace(config, block_m=rows // 2, num_warps=max(warps // 2, 1))
    return replace(config, block_m=rows * 2, num_warps=warps * 2)


def compare(
    case: Case, subject: Subject, cell: Cell, arena: Arena
) -> tuple[CaseResult, Record | None]:
    """Run a case and the plain kernel on it, and compare bits; the record says where they
    differ."""
    trial = subject.trial(case.problem, cell, arena)
    if against := _fails(trial):
        return CaseResult(case.id, trial.first.reply.status, against), None
    plain = plain_of(subject.declaration)
    compared = {"the plain kernel": _beside(trial, plain, plain.configs[0])}
    if case.problem.dtype in _EIGHT:
        tiled = other_rows(subject.config)
        compared[f"config {tiled.name}"] = _beside(trial, subject.declaration, tiled)
    for than, other in compared.items():
        if against := _fails(other):
            return CaseResult(case.id, other.first.reply.status, f"{than}: {against}"), None
        wanted = other.first.outputs
        if other.declaration is plain and case.problem.dtype in _EIGHT:
            wanted = {"lse": wanted["lse"]}
        if told := difference(trial.first.outputs, wanted, than):
            text = f"under FPSan {told}"
            return CaseResult(case.id, "ok"), Record(tool=FPSAN, kind=KIND, text=text, words=text)
    return CaseResult(case.id, "ok"), None


def _beside(trial: Trial, declaration: Declaration, config: Config) -> Trial:
    """The same problem, by another kernel or config; a backward reads the same saved tensors."""
    return replace(
        trial,
        declaration=declaration,
        config=config,
        notes={},
        launches={"saved": trial.saved} if trial.entry == "backward" else {},
        _plans={},
        _beside={},
    )


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
