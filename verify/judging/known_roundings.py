"""Judge gradients by the numbers that P and dS are once they are rounded, and by their own last
rounding (docs/tolerance-backward.md, *Known roundings* and *Lattice*)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor

from verify.evidence import Finding
from verify.judging.findings import place, worst
from verify.judging.lattice import Explained, explained
from verify.judging.trial import Trial
from verify.tolerance.backward import GradientTruth
from verify.tolerance.intervals import Interval
from verify.variant import GradientNumerics, ScoreGradient


@dataclass
class KnownRoundings:
    """A trial's gradients against their intervals: of its declaration, and, if a tensor is outside,
    of every declaration that rounds less.

    A declaration says what a kernel rounds at most: one that keeps P in fp32 where it declares 16
    bits is right, and so are exact gradients.  But all elements of a tensor must be explained by
    one of them.
    """

    trial: Trial
    _made: list[GradientTruth] = field(default_factory=list)

    def judge(
        self, name: str, got: Tensor, own: Explained | None
    ) -> tuple[Finding | None, dict[str, float]]:
        """The finding against "dq", "dk" or "dv", and its measures: `lattice`, the
        largest part that an element needs of how far it may lie from the middle; `single`, of the
        elements that are asked, the share for which one stored number alone is accepted.

        own: what the tensor needs under the declaration itself; None for a function without one.
        """
        if own is None:
            return None, {}
        output, found = self.trial.problem.format, own.measures(name)
        if own.largest <= 1:
            return None, found
        for other in self._alternatives():
            assert other.intervals is not None
            span = other.intervals[name]
            least = float(explained(got, span.middle, span.reach, output).max())
            found[f"lattice_{name}"] = min(found[f"lattice_{name}"], least)
            if least <= 1:
                return None, found
        intervals = self.trial.known_gradients.intervals
        assert intervals is not None
        return _finding(name, got, intervals[name], own.ratio), found

    def _alternatives(self) -> Iterator[GradientTruth]:
        declared = self.trial.declaration.gradients
        assert declared is not None
        for n, other in enumerate(finer(declared, self.trial.problem.dtype)):
            if n == len(self._made):
                self._made.append(self.trial.gradients_under(other))
            yield self._made[n]


def finer(declared: GradientNumerics, dtype: str) -> Iterator[GradientNumerics]:
    """Declarations of which each rounds less, one after the other, for a problem of that dtype:
    with some of the declared roundings of P and dS to 16 bits left out; last, one with none of them
    that takes no error from the saved tensors, but makes its own softmax."""
    softmax, scores = declared.softmax, declared.score_gradient
    narrow = [
        (dtype if x == "input" else x) != "float32" for x in (softmax.probability, scores.dtype)
    ]
    choices = itertools.product(
        (softmax.probability, "float32")[: 1 + narrow[0]],
        (scores.of, "unrounded")[: 1 + (scores.of == "rounded" and narrow[0])],
        (scores.scaled, False)[: 1 + (scores.scaled and narrow[1])],
        (scores.dtype, "float32")[: 1 + narrow[1]],
    )
    next(choices)  # the declaration itself
    for probability, of, scaled, kept in choices:
        yield replace(
            declared,
            softmax=replace(softmax, probability=probability),
            score_gradient=replace(scores, of=of, scaled=scaled, dtype=kept),
        )
    yield replace(
        declared,
        softmax=replace(softmax, source="own", probability="float32"),
        score_gradient=ScoreGradient(dtype="float32"),
    )


def _finding(name: str, got: Tensor, own: Interval, ratio: Tensor) -> Finding:
    """Against the element that is worst under the declaration itself."""
    index = worst(ratio)
    value, middle, reach = float(got[index]), float(own.middle[index]), float(own.reach[index])
    count = int((ratio > 1).sum())
    return Finding(
        oracle="gradient_bound",
        message=(
            f"{name} is no rounding of what P and dS give once they are rounded, to nearest, or"
            f" left in fp32: got {value:.9g}, should be {middle:.9g} to within {reach:.4g} before"
            f" it is rounded at {place(name, index)} (needs {float(ratio[index]):.3g} times that);"
            f" {count} of {ratio.numel()} elements are so"
        ),
        got=value,
        bound=reach,
        where=place(name, index),
        count=count,
        total=ratio.numel(),
    )
