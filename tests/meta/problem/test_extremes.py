"""Problems at the edges of fp32's range are drawn in every campaign, and `tests.extremes` finds
them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from tests.extremes import extreme, extremes, main
from tests.harness.fake_trials import DECLARED
from verify.bundle import ROOT
from verify.campaign.targets import Target
from verify.problem import Problem
from verify.problem.inputs import tensors
from verify.problem.sampling import draws
from verify.problem.strategies import EXTREME_SCALES

TARGET = Target(DECLARED, DECLARED.configs[0], "float32", "accuracy")


def test_some_draws_are_extreme_and_most_are_not() -> None:
    drawn = draws(TARGET.problems, 400)
    found = [problem for problem in drawn if extreme(problem)]
    assert 0.04 < len(found) / len(drawn) < 0.5
    assert {problem.distribution for problem in found} > {"range_edges"}
    assert sum(abs(problem.scale) in EXTREME_SCALES for problem in found) > 8


def test_extreme_problems_differ_and_come_again() -> None:
    found = list(extremes(TARGET, 12, pairs=4000))
    assert len({problem.name for problem in found}) == 12
    assert all(extreme(problem) and problem.pairs <= 4000 for problem in found)
    assert [problem.name for problem in islice(extremes(TARGET, 12, pairs=4000), 4)] == [
        p.name for p in found[:4]
    ]
    assert Problem.parse(found[-1].name) == found[-1]


def test_the_sizes_of_scores_reach_fp32_s_largest_number() -> None:
    """And those of every format what it can, raw scores beyond fp32's range under a scale of 0
    included."""
    sizes = []
    for seed in range(60):
        problem = Problem(
            seqlen_q=4,
            seqlen_kv=5,
            head_dim=16,
            dtype="bfloat16",
            distribution="range_edges",
            seed=seed,
            softmax_scale=0.5,
        )
        given = tensors(problem)
        assert bool(given.q.isfinite().all())
        assert bool(given.k.isfinite().all())
        assert not given.v[..., ::4].any()
        sizes.append(float((given.q.double() @ given.k.double().mT).abs().max()) * 0.5)
    for low, high in (
        (0.1, 10.0),
        (2.0**27, 2.0**30),
        (2.0**90, 2.0**110),
        (1e38, 3.4e38),
        (1e39, 1e42),
    ):
        assert any(low <= size <= high for size in sizes), (low, high)
    raw = []
    for seed in range(20):
        given = tensors(problem.but(softmax_scale=0.0, seed=seed))
        raw.append(float((given.q.double() @ given.k.double().mT).abs().max()))
    assert max(raw) > 3.4e38


def test_the_command_judges_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kernel = str(ROOT / "kernels" / "torch" / "math_backward.py")
    words = ["-k", "torch-math-backward", "--group", "gradients", "--per-variant", "1"]
    assert main([kernel, *words, "--pairs", "400"]) == 0
    assert "3 cases, 0 failing" in capsys.readouterr().out
