"""A covering array: drawn problems in which every level of a factor meets every level of every
other one, as far as the support lets them meet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from verify.campaign.edge_cases import drawn
from verify.campaign.targets import Target
from verify.problem import Problem
from verify.problem.factors import Pair, levels, pairs

_ROUND = 500  # draws; a millisecond each
_ROUNDS = 6


def covering(target: Target, given: Iterable[Problem] = ()) -> list[Problem]:
    """Problems in which all pairs meet that meet in the draws of the target, less those that meet
    in the `given` ones: a greedy choice, in the order in which it was made.

    Each step takes the problem with the most new pairs; among equals the cheapest.
    """
    cases = candidates(target)
    numbers: dict[Pair, int] = {}
    sets = [_bits(pairs(levels(problem, target.config)), numbers) for problem in cases]
    missing = (1 << len(numbers)) - 1
    for problem in given:
        missing &= ~_bits(pairs(levels(problem, target.config)), numbers)
    return [cases[i] for i in _greedy(sets, [problem.pairs for problem in cases], missing)]


def candidates(target: Target) -> list[Problem]:
    """The draws from which is chosen, each once."""
    found = (problem for n in range(_ROUNDS) for problem in drawn(target, _ROUND, n))
    return list({problem.name: problem for problem in found if problem.pairs}.values())


def _bits(found: set[Pair], numbers: dict[Pair, int]) -> int:
    """A set of pairs as an integer; a new pair gets the next number."""
    bits = 0
    for pair in sorted(found):
        bits |= 1 << numbers.setdefault(pair, len(numbers))
    return bits


def _greedy(sets: Sequence[int], costs: Sequence[int], missing: int) -> list[int]:
    """The numbers of the sets that together hold all that is missing."""
    chosen = []
    left = list(range(len(sets)))
    while missing and left:
        gains = {i: (sets[i] & missing).bit_count() for i in left}
        left = [i for i in left if gains[i]]
        if not left:
            break
        best = max(left, key=lambda i: (gains[i], -costs[i]))
        chosen.append(best)
        missing &= ~sets[best]
    return chosen
