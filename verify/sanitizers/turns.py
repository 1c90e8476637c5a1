"""The order in which sessions of planted faults begin."""

from __future__ import annotations

from collections.abc import Sequence

from verify.sanitizers.fault import PlantedFault


def in_turn(faults: Sequence[PlantedFault], tools: Sequence[str]) -> list[tuple[PlantedFault, str]]:
    """Every fault with each tool that it is tried under, in the order in which sessions begin.

    First comes every fault under one tool, the last of them first (the copies of CuTe kernels,
    whose builds take longest); then under the others.  A session that needs a build of another
    would only wait for it, in a worker's place.
    """
    turns = [
        (turn, fault, tool)
        for fault in reversed(faults)
        for turn, tool in enumerate(fault.tried_under(tools))
    ]
    return [(fault, tool) for _, fault, tool in sorted(turns, key=lambda each: each[0])]


def repeated(
    turns: Sequence[tuple[PlantedFault, str]], repeat: int
) -> list[tuple[int, PlantedFault, str, int]]:
    """Every session of planted faults that are tried `repeat` times: (number of the repetition,
    fault, tool, tries in its process), in the order in which they begin.

    Without repetition, in the order of `turns`.  Else those come first of which something is
    required: every one of them before any is repeated, and copies of shipped kernels, whose builds
    the first session makes, are repeated last.  What needs no repetition ends the run, which can be
    cut there and has its counts.
    """
    if repeat == 1:
        return [(0, fault, tool, 1) for fault, tool in turns]
    required = [(fault, tool) for fault, tool in turns if fault.wanted(tool) != "any"]
    within = [pair for pair in required if pair[0].repeats_within(pair[1])]
    own = [pair for pair in required if pair not in within]
    again = [(number, *pair, 1) for number in range(1, repeat) for pair in own]
    return [
        *((0, *pair, repeat if pair in within else 1) for pair in required),
        *sorted(again, key=lambda each: bool(each[1].copy_of)),
        *((0, *pair, 1) for pair in turns if pair not in required),
    ]
