"""Cases that can lie in one stack."""

from __future__ import annotations

from collections.abc import Sequence

from verify.problem import Problem


def neighbours(shape: Problem, distributions: Sequence[str]) -> list[Problem]:
    """Of one shape: other values, seeds and numbers of sequences."""
    return [
        shape.but(
            distribution=name,
            seed=number,
            batch=1 + number % 3 if shape.batch == 1 else shape.batch,
        )
        for number, name in enumerate(distributions)
    ]
