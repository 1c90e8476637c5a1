"""Softcap: a smooth limit on the size of scores (Gemma 2, arXiv 2408.00118)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from references.premises import Premise
from references.score_mods.base import Device, Extent, Rounding, ScoreFunction, ScoreMod
from references.tensor import Tensor, torch

_DIRECT = 30.0  # larger exponents need no exponential: the slope is off by 1 at most


@dataclass(frozen=True)
class Softcap(ScoreMod):
    """f(s) = cap tanh(s / cap), with the slope 1 - tanh^2(s / cap)."""

    cap: float
    word: ClassVar[str] = "softcap"
    steepest: ClassVar[float] = 1.0
    breaks: ClassVar[frozenset[Premise]] = frozenset(
        {Premise.LINEAR_SCORES, Premise.UNBOUNDED_SCORES}
    )

    def __post_init__(self) -> None:
        if not math.isfinite(self.cap):
            raise ValueError(f"softcap: {self.cap} is not finite")
        if self.cap <= 0:
            raise ValueError(f"softcap: {self.cap} is not positive")

    @property
    def text(self) -> str:
        return str(self.cap)

    @classmethod
    def parse(cls, text: str) -> Softcap:
        return Softcap(float(text))

    @classmethod
    def gallery(cls) -> tuple[ScoreMod, ...]:
        return Softcap(20.0), Softcap(50.0), Softcap(1.0)

    @property
    def divisor(self) -> float:
        return self.cap

    def function(self, extent: Extent, device: Device = "cpu") -> ScoreFunction:
        return lambda s, b, h, q, k: s.div_(self.cap).tanh_().mul_(self.cap)

    def precise(self, mp: Any, extent: Extent, score: Any, at: tuple[int, int, int, int]) -> Any:
        return self.cap * mp.tanh(score / self.cap)

    def slope(self, modified: Tensor) -> Tensor:
        return 1 - (modified / self.cap).square_()

    def reach(self, extent: Extent, size: Tensor) -> Tensor:
        return size.clamp(max=self.cap)

    def moved(self, size: Tensor, error: Tensor, modified: Tensor) -> Tensor:
        """tanh is flatter at larger scores, so f(s) moves most if s moves towards 0."""
        return modified - size.sub_(error).div_(self.cap).tanh_().mul_(self.cap)

    @property
    def noise(self) -> float:
        return 2.0**-50 * self.cap

    def roundings(self, extent: Extent) -> tuple[Rounding, ...]:
        """fp32: cap, 1 / cap and a product before the tanh; as many and the tanh's own after it.
        16 bits: the quotient before; the tanh and its product with cap after."""
        return (
            Rounding("score", 3, narrow=1, step=self.cap),
            Rounding("result", 4, narrow=2, step=1 + self.cap, function="tanh"),
        )

    def sibling(self) -> ScoreMod:
        return Softcap(2 * self.cap)

    def slope_error(self, slope: Tensor | None, error: Tensor, result: float, u: float) -> Tensor:
        """The error from the argument, plus the error from the kernel's own tanh there, squared.

        The slope of the logarithm of 1 - tanh^2 is at most 2 in size, the slope of tanh at most 1.
        """
        moved = error / self.cap
        large = 2 * moved > _DIRECT
        steep = torch.expm1((2 * moved).clamp(max=_DIRECT))
        squared = result * result * (1 + u) - 1
        if slope is None:
            return steep.masked_fill(large, 1.0).clamp(max=1.0) + squared
        steep = ((slope + 2.0**-50) * steep).masked_fill(large, 1.0)
        tangent = ((1 - slope).clamp(min=0.0).sqrt() + moved).clamp(max=1.0)
        return steep.clamp(max=1.0) + squared * tangent * tangent


def cap_of(mod: ScoreMod | None) -> float:
    """The cap of a softcap; 0 for every other score mod, and for none."""
    return mod.cap if isinstance(mod, Softcap) else 0.0
