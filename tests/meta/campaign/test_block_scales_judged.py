"""Kernels of inputs with one factor for 64 rows, in a cell: the right one passes all oracles that
are asked, and a factor of another block is found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from references.masks import Causal, Lengths
from references.quantisation import ByBlockOf64
from verify.campaign.judge import Judge
from verify.campaign.targets import Target
from verify.cell.discovery import roster
from verify.cell.process import ROOT
from verify.evidence import Recorder, Verdict
from verify.problem import Problem
from verify.problem.coverage import bins_reachable, coverage_bins
from verify.problem.sampling import draws
from verify.problem.strategies import LIMITS, problems
from verify.variant import Config, Declaration

KERNELS = ROOT / "tests" / "sample_kernels" / "block_scales.py"
PROBLEM = Problem(
    batch=2,
    heads_q=4,
    heads_kv=2,
    seqlen_q=70,
    seqlen_kv=150,
    head_dim=32,
    dtype="float8_e4m3fn",
    quantisation=ByBlockOf64(),
    seed=7,
)


@pytest.fixture(scope="module")
def declared() -> dict[str, Declaration]:
    found = roster([KERNELS])
    assert not found.failures
    return {declaration.name: declaration for declaration in found.declarations}


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[Judge]:
    made = Judge(Recorder(tmp_path, "main"))
    try:
        yield made
    finally:
        made.close()


def verdicts(
    judge: Judge, declaration: Declaration, group: str, problem: Problem
) -> dict[str, Verdict]:
    target = Target(declaration, declaration.configs[0], problem.dtype, group)
    return {found.oracle: found for found in judge.judge(target, problem)}


def test_the_right_kernel_passes(declared: dict[str, Declaration], judge: Judge) -> None:
    """Ordinary problems, O as a row of V, masked poison, and what is outside the support."""
    lengths = Lengths((70, 9), (150, 65))
    hidden, sharp = PROBLEM.but(mask=lengths), {"softmax_scale": -0.3, "distribution": "one_hot_v"}
    for group, oracle, problem in (
        ("accuracy", "bound", PROBLEM),
        ("accuracy", "convexity", PROBLEM.but(mask=Causal(), **sharp)),
        ("gather", "gather", PROBLEM.but(distribution="gather")),
        ("poison", "poison", hidden),
    ):
        found = verdicts(judge, declared["right"], group, problem)
        assert not [each.finding for each in found.values() if each.outcome == "fail"]
        assert found[oracle].outcome == "pass"


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_the_scale_of_the_next_block_is_found(
    name: str, declared: dict[str, Declaration], judge: Judge
) -> None:
    found = verdicts(judge, declared[f"{name}-of-the-next-block"], "accuracy", PROBLEM)
    assert found["bound"].outcome == "fail"


def test_exact_questions_find_it_too(declared: dict[str, Declaration], judge: Judge) -> None:
    """Q and K have factors of 1 there, so that a key wins; V's are powers of two."""
    problem = PROBLEM.but(distribution="gather")
    found = verdicts(judge, declared["v-of-the-next-block"], "gather", problem)
    assert found["gather"].outcome == "fail"


def test_the_scale_of_another_query_head_is_found(
    declared: dict[str, Declaration], judge: Judge
) -> None:
    """Blocks of Q have a factor for each query head, not for the key head."""
    found = verdicts(judge, declared["q-of-the-key-head"], "accuracy", PROBLEM)
    assert found["bound"].outcome == "fail"


def test_block_scales_are_drawn_and_covered(declared: dict[str, Declaration]) -> None:
    declaration = declared["right"]
    assert "descaling_by_block" in bins_reachable(declaration.support)
    strategy = problems(declaration, dtype="float8_e4m3fn", limits=LIMITS["cpu"])
    drawn = draws(strategy, 60)
    assert {problem.descaling for problem in drawn} == {"block64"}
    filled = [
        problem for problem in drawn if "descaling_by_block" in coverage_bins(problem, Config())
    ]
    assert len(filled) >= 10
