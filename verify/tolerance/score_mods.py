"""What a score mod does to the errors of scores: its list of roundings, read for one problem and
what a kernel declares (docs/tolerance.md, *A score mod*)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from references.row_blocks import RowBlock
from references.score_mods import Extent, ScoreMod
from verify.arithmetic.dtypes import DType
from verify.problem import Problem
from verify.tolerance.arithmetic import TINY, U, relative

Quantity = Literal["score", "added", "result"]


class _Scaled(Protocol):
    """What both `ForwardArithmetic` and `GradientArithmetic` say of scores."""

    @property
    def scale_roundings(self) -> int: ...
    @property
    def function(self) -> float: ...


def factor_error(problem: Problem, a: _Scaled) -> float:
    """Relative error of a scaled score beside its product's: roundings of the scale, and of what a
    score mod does in front of its function.

    Where the scale over the mod's divisor is below fp32's normal range, it may be flushed to 0,
    which loses all of a score.
    """
    mod = mod_errors(problem, a)
    before, divisor = (mod.count("score"), mod.f.divisor) if mod else (0, 0.0)
    flushed = 0 < abs(problem.scale) < divisor * TINY
    return relative(a.scale_roundings + 1 + before, U) + flushed


def narrow_roundings(problem: Problem, a: _Scaled) -> tuple[int, float]:
    """Roundings of a score that is kept in 16 bits, as it comes, scaled, and on its way into a
    score mod's function, and what the smallest number of the format is multiplied by there."""
    mod = mod_errors(problem, a)
    count, step = mod.narrow("score") if mod else (0, 0.0)
    return 2 + count, step


def mod_errors(problem: Problem, a: _Scaled) -> ModErrors | None:
    """The errors of the problem's score mod under that arithmetic; None without one."""
    mod = problem.score_mod
    return None if mod is None else ModErrors(mod, problem.extent, a.function)


@dataclass(frozen=True)
class ModErrors:
    """The errors of one score mod, f(s).  function: relative error of what it computes f(s) by."""

    f: ScoreMod
    extent: Extent
    function: float

    def count(self, of: Quantity) -> int:
        """fp32 roundings relative to that quantity."""
        return sum(each.count for each in self.f.roundings(self.extent) if each.of == of)

    def narrow(self, of: Quantity) -> tuple[int, float]:
        """Roundings relative to that quantity in a kernel that keeps scores in 16 bits, and what
        the smallest number of that format is multiplied by besides."""
        found = [each for each in self.f.roundings(self.extent) if each.of == of]
        return sum(each.narrow or 0 for each in found), sum(each.step for each in found)

    @property
    def result(self) -> float:
        """f(s) as computed is f(s) times 1 to this, or one over that, roundings of scores in 16
        bits left out."""
        return (1 + self.function) * (1 + relative(self.count("result"), U))

    def errors(
        self, block: RowBlock, size: Tensor, error: Tensor, narrow: DType | None = None
    ) -> tuple[Tensor, Tensor]:
        """How far each f(s) may stray where s does by `error`, and |f(s)|; both 0 where masked.

        size: |s|, 0 where masked; it and `error` are lost.  narrow: the 16 bits of the scores.
        """
        modified = size_of(block.scores)
        error = self.f.moved(size, error, modified).add_(self.f.noise)
        rounding = self.result - 1
        added = relative(self.count("added"), U)
        if narrow is not None:
            rounding, lost = self.coarse("result", rounding, narrow)
            error.add_(lost)
            added, lost = self.coarse("added", added, narrow)
            error.add_(lost)
        if added:
            moved = (block.scores - block.scaled).abs_().nan_to_num_(posinf=0.0)
            error.add_(moved, alpha=added)
        return error.mul_(1 + rounding).add_(modified, alpha=rounding), modified

    def coarse(self, of: Quantity, rounding: float, dtype: DType) -> tuple[float, float]:
        """That relative error with the roundings of scores in 16 bits, and what these lose."""
        count, step = self.narrow(of)
        coarse = relative(count, dtype.unit_roundoff)
        return (1 + rounding) * (1 + coarse) - 1, dtype.smallest_subnormal * step


def largest_error(
    problem: Problem, a: _Scaled, reached: Tensor, error: Tensor, narrow: DType | None = None
) -> tuple[Tensor, Tensor]:
    """How far any f(s) of a row may stray for |s| <= reached, where s does by `error`, and the
    largest |s| or |f(s)|, any shape; `error` and `reached` without a score mod."""
    mod = mod_errors(problem, a)
    if mod is None:
        return error, reached
    added, lost = relative(mod.count("added"), U), 0.0
    rounding = mod.result - 1
    if narrow is not None:
        rounding, lost = mod.coarse("result", rounding, narrow)
        added, more = mod.coarse("added", added, narrow)
        lost += more
    error, size = error * mod.f.steepest, mod.f.reach(mod.extent, reached)
    most = mod.f.reach(mod.extent, torch.zeros_like(reached))
    error = error + rounding * (size + error) + mod.f.noise
    return error + (added * most + lost) * (1 + rounding), torch.maximum(reached, size)


def largest_slope(problem: Problem, a: _Scaled, error: Tensor) -> Tensor | float:
    """No slope is larger as computed where s is off by `error`; 1 without a score mod."""
    mod = mod_errors(problem, a)
    if mod is None or mod.f.slope(torch.zeros(())) is None:
        return 1.0
    moved = mod.f.slope_error(None, error, mod.result, U)
    return mod.f.steepest + moved * (1 + U) + U * mod.f.steepest


def size_of(scores: Tensor, out: Tensor | None = None) -> Tensor:
    """|S|, and 0 where masked; in the memory of `out`, if that is given."""
    return torch.abs(scores, out=out).nan_to_num_(nan=torch.nan, posinf=0.0)
