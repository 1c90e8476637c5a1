"""Problems at the edges of fp32's range are drawn in every campaign, and `tests.extremes` finds
them."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extremes import extreme, extremes, main
from tests.harness.court import court_of
from tests.harness.fake_trials import DECLARED
from verify.arithmetic.dtypes import DTYPES
from verify.bundle import ROOT
from verify.campaign.targets import Target
from verify.problem import Problem
from verify.problem.distributions import _EDGES, DISTRIBUTIONS, Values, distribution
from verify.problem.inputs import tensors
from verify.problem.sampling import draws
from verify.problem.source import NORMAL, Source
from verify.problem.strategies import EXTREME_SCALES

SMALL: Any = {"seqlen_q": 3, "seqlen_kv": 5}
TARGET = Target(DECLARED, DECLARED.configs[0], "float32", "accuracy")


def test_some_draws_are_extreme_and_most_are_not() -> None:
    drawn = draws(TARGET.problems, 400)
    found = [problem for problem in drawn if extreme(problem)]
    assert 0.04 < len(found) / len(drawn) < 0.5
    assert {problem.distribution for problem in found} > {"range_edges"}
    assert sum(abs(problem.scale) in EXTREME_SCALES for problem in found) > 8


@pytest.mark.for_ci
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


FOUND = tuple(  # K held an infinity: two right kernels were convicted of NaN
    f"{sizes},d=256,{rest},dist=range_edges,seed={seed}"
    for sizes, rest, seed in (
        ("sq=31,skv=31", "dtype=float16,mask=causal", 1599),
        ("sq=31,skv=31", "dtype=float16,mask=causal", 311216),
        ("sq=47,skv=47", "dv=259,dtype=float16,mask=dense.0.352", 1599),
    )
)


@pytest.mark.parametrize("text", FOUND)
def test_what_a_campaign_drew_is_finite(text: str) -> None:
    given = tensors(Problem.parse(text))
    assert all(bool(tensor.isfinite().all()) for tensor in given.named.values())


@pytest.mark.parametrize("dtype", [*DTYPES])
def test_no_draw_leaves_the_range_of_its_format(dtype: str) -> None:
    """Whatever the scale and the head dim: a campaign draws the largest number of `normal` once in
    65,536 elements."""
    largest = float(NORMAL.values(torch.device("cpu")).abs().max())
    sizes = []
    for head_dim in range(1, 513, 7):
        for scale in (0.0, 2.0**-60, 0.01, *(1.0 + 0.06 * step for step in range(17)), 2.0**60):
            source = Source(Problem(head_dim=head_dim, dtype=dtype, softmax_scale=scale, **SMALL))
            for logit in _EDGES:
                sizes += [size for skew in (0, 24, -24) for size in source.scores(logit, skew)]
    most = max(sizes) * largest
    assert most < source.problem.format.max
    assert most * 2 > source.problem.format.max  # and as near to it as a factor of 2


def test_no_kernel_is_convicted_on_an_infinity(tmp_path: Path) -> None:
    """Should a distribution have such a fault again: it is the judge's, whatever a kernel gives."""
    text = (ROOT / "tests" / "sample_kernels" / "wrong_zeros.py").read_text(encoding="utf-8")

    @distribution(oracle=True)
    def boundless(source: Source) -> Values:
        """One element of Q is an infinity, as no distribution may draw it from its random words."""
        q = source.normal("q").clone()
        q[..., 0, 0] = math.inf
        return q, source.normal("k"), source.normal("v")

    problem = Problem(head_dim=16, dtype="float32", distribution="boundless", **SMALL)
    try:
        with court_of(tmp_path, wrong_zeros=text) as court:
            with pytest.raises(ValueError, match=r"dist=boundless.*: q holds what is not finite"):
                court.verdicts("wrong_zeros", "accuracy", problem)
            with_normal = problem.but(distribution="normal").name
            assert "bound" in court.convicted("wrong_zeros", "accuracy", with_normal)
    finally:
        del DISTRIBUTIONS["boundless"]


def test_the_command_judges_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kernel = str(ROOT / "kernels" / "torch" / "math_backward.py")
    words = ["-k", "torch-math-backward", "--group", "gradients", "--per-variant", "1"]
    assert main([kernel, *words, "--pairs", "400"]) == 0
    assert "3 cases, 0 failing" in capsys.readouterr().out
