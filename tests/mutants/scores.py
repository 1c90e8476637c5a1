"""verify/report/mutation_scores.py: the scores that a report shows beside the kernels that it
judged."""

from __future__ import annotations

from pathlib import Path

from kernels.cute import flash_forward
from tests.mutants.cuda.mutant import BUILDS
from tests.mutants.cuda.mutant import chosen as cuda_chosen
from tests.mutants.cute.mutant import chosen as cute_chosen
from tests.mutants.mutant import Mutant
from tests.mutants.record import CUDA, CUTE, TRITON, Ledger, Score
from tests.mutants.triton.mutant import chosen
from verify.cell.discovery import roster
from verify.cell.process import ROOT

PATH = ROOT / "verify" / "report" / "mutation_scores.py"
_HEAD = '''"""Mutants of the kernels' sources, by variant: the kernel's source hash, and how many
are killed, counted, judged and chosen (`verify.report.campaign_schema.MutationReport`).

`python -m tests.mutants` writes this file.
"""

from __future__ import annotations

from collections.abc import Mapping

SCORES: Mapping[str, tuple[str, tuple[int, int, int, int]]] = {
'''
Numbers = tuple[int, int, int, int]


def numbers() -> dict[str, Numbers]:
    """Killed, counted, judged and chosen mutants of each variant, sorted."""
    mine: dict[str, list[Mutant]] = {}
    for mutant in chosen():
        mine.setdefault(mutant.variant, []).append(mutant)
    found = {variant: _numbers(mutants, TRITON) for variant, mutants in mine.items()}
    shared = _numbers(list(cuda_chosen()), CUDA)
    found |= dict.fromkeys((build.variant.name for build in BUILDS), shared)
    found[flash_forward.VARIANT.name] = _numbers(list(cute_chosen()), CUTE)
    return dict(sorted(found.items()))


def _numbers(mutants: list[Mutant], ledger: Ledger) -> Numbers:
    score = Score.of(mutants, ledger)
    return score.killed, score.counted, score.judged, len(mutants)


def sources(files: list[Path] | None = None) -> dict[str, str]:
    """The source hash of every variant of these files; default: of the collection."""
    return {each.ref: each.source_hash for each in roster(files).declarations}


def module(hashes: dict[str, str]) -> str:
    """The module's text, with these source hashes."""
    lines = (
        f'    "{variant}": ("{hashes[variant]}", {scored}),\n'
        for variant, scored in numbers().items()
        if scored[2]
    )
    return f"{_HEAD}{''.join(lines)}}}\n"
