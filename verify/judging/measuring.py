"""Measure the properties in a contract from raw outputs, one by one.  No declaration is trusted.

A file measures related properties.  Each `measure(trial)` runs further problems beside the trial
(`Trial.beside`), with inputs for which the possible answers differ clearly, and gives the kernel's
answer as a word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from references.masks import Causal, Full, Lengths, Mask
from references.score_mods import ScoreMod
from verify.arithmetic.rounding import cast
from verify.evidence import Finding
from verify.judging.findings import Ruling
from verify.judging.launch import Launch
from verify.judging.run_checks import fault
from verify.judging.trial import Trial
from verify.problem import Problem
from verify.problem.inputs import Inputs, unit_factors
from verify.problem.lengths import raised
from verify.problem.refusal import fewest_heads, nearest_head_dim, plainest
from verify.variant import Declaration, Support

UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One property as a kernel's outputs show it.

    word: the measured value.  declared: the promised value in the same words, or "" without one.
    contradicts: whether the two exclude each other.  evidence: the values that decided.
    """

    name: str
    word: str
    declared: str = ""
    contradicts: bool = False
    evidence: str = ""


class SpoiledError(Exception):
    """A further run failed a check and gave no results; `ruling` says why."""

    def __init__(self, ruling: Ruling) -> None:
        super().__init__(ruling.finding.message if ruling.finding is not None else "")
        self.ruling = ruling


def checked(trial: Trial, run: Launch) -> Launch:
    """The run, if it passes the checks of every run; else raises SpoiledError."""
    ruling = fault(trial, run)
    if ruling is not None:
        raise SpoiledError(ruling)
    return run


def result(run: Launch) -> Tensor:
    """O of a checked run."""
    assert run.out is not None
    return run.out


def make_inputs(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    """Inputs of these values (any float dtype, logical shapes), rounded to the problem's dtype; all
    factors are 1."""
    shapes = {"q": (q, problem.shape_q), "k": (k, problem.shape_k), "v": (v, problem.shape_v)}
    stored = {
        name: rounded(tensor.double().expand(shape), problem)
        for name, (tensor, shape) in shapes.items()
    }
    return Inputs(stored["q"], stored["k"], stored["v"], unit_factors(problem))


def rounded(tensor: Tensor, problem: Problem) -> Tensor:
    """fp64 values rounded to the problem's dtype."""
    return cast(tensor.numpy(), problem.format)


def run_probe(trial: Trial, tag: str, problem: Problem, inputs: Inputs) -> Trial:
    """The trial of another problem for the same kernel, after its first run has passed all checks;
    raises SpoiledError."""
    other = trial.beside(tag, problem, inputs)
    checked(other, other.first)
    return other


def probe_problem(
    declaration: Declaration,
    dtype: str,
    *,
    head_dim: int = 64,
    **shape: int | Mask | ScoreMod | None,
) -> Problem:
    """A problem of that dtype with contiguous normal inputs and the supported head dim nearest to
    `head_dim`.  If the support needs it, lengths are raised to those that it has, and a key head
    has two query heads."""
    support = declaration.support
    lengths = [int(shape.pop(name)) for name in ("seqlen_q", "seqlen_kv")]  # type: ignore[arg-type]
    rows, keys = raised(support, *lengths)
    shape.setdefault("heads_q", fewest_heads(support))
    return Problem(
        seqlen_q=rows,
        seqlen_kv=keys,
        head_dim=nearest_head_dim(support.head_dims, head_dim),
        dtype=dtype,
        seed=1,
        **plainest(support),
        **shape,  # type: ignore[arg-type]
    )


def open_mask(support: Support) -> Mask:
    """The supported mask that hides the fewest keys: none, or causal (its last row sees all)."""
    return (
        Full()
        if "full" in support.masks
        else Causal("tl" if "causal.tl" in support.masks else "br")
    )


def plain(trial: Trial) -> bool:
    """Whether the problem has keys and its mask is the `open_mask` of the support."""
    p = trial.problem
    return p.mask == open_mask(trial.declaration.support) and p.seqlen_kv > 0


def hides(support: Support) -> tuple[Mask, ...]:
    """Supported masks of one sequence that hide keys from some rows and leave no row empty if
    seqlen_q <= seqlen_kv."""
    kinds: dict[str, Mask] = {
        "causal": Causal(),
        "causal.tl": Causal("tl"),
        "causal.square": Causal(),
    }
    return tuple(mask for kind, mask in kinds.items() if kind in support.masks)


def shortened(problem: Problem, keys: int) -> Mask:
    """The mask of all queries and the first `keys` keys of every sequence."""
    return Lengths((problem.seqlen_q,) * problem.batch, (keys,) * problem.batch)


def ruling_of(
    oracle: str, found: Sequence[Measured], measures: Mapping[str, float] | None = None
) -> Ruling:
    """One ruling on all measured properties; its finding names every contradiction."""
    broken = [m for m in found if m.contradicts]
    finding = None
    if broken:
        message = "; ".join(
            f"declares {m.name} {m.declared}, is {m.word}" + f" ({m.evidence})" * bool(m.evidence)
            for m in broken
        )
        finding = Finding(
            oracle=oracle,
            message=message,
            got=broken[0].word,
            bound=broken[0].declared,
            where=broken[0].name,
        )
    return Ruling(finding, measures or {}, observed(found))


def observed(found: Sequence[Measured]) -> dict[str, str]:
    """The entries of the evidence: each property's word by its name, and beside it `name:declared`
    and `name:contradicts`."""
    words: dict[str, str] = {}
    for m in found:
        words[m.name] = m.word
        if m.declared:
            words[f"{m.name}:declared"] = m.declared
        if m.contradicts:
            words[f"{m.name}:contradicts"] = m.evidence or "yes"
    return words


def number(value: float) -> str:
    """A special value in words: 0, -inf, +inf, NaN, or the number."""
    if math.isnan(value):
        return "NaN"
    return f"{value:+}" if math.isinf(value) else f"{value:g}"
