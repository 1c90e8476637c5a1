"""Statistics of a campaign on trial: limits hold what they promise, pools count what they should,
and what follows is told."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.harness.rendered import as_html, as_markdown
from verify.arithmetic.dtypes import dtype_named
from verify.campaign.conclusion import write_report
from verify.campaign.run import CampaignRun
from verify.evidence import Recorder, RunInfo, Verdict, load
from verify.problem import Problem
from verify.report import build, dumps, parse
from verify.statistics.limits import FALSE_ALARM, mean_limit, rows_for_note, square_limit
from verify.statistics.pool import Pool, pools
from verify.statistics.rows import UNIFORM, chosen, half_place, unsuited
from verify.statistics.verdicts import findings

ROWS = 2000


@pytest.mark.parametrize("rows", [1, 10, 1000, 100_000])
@pytest.mark.parametrize("chance", [1e-2, FALSE_ALARM, 1e-12])
def test_normal_rows_pass_the_limits_less_often_than_promised(rows: int, chance: float) -> None:
    """The worst rows that the derivation allows: one normal number each, whatever the columns."""
    half = torch.tensor(rows / 2, dtype=torch.float64)
    squares = torch.special.gammaincc(half, half * square_limit(rows, chance))
    means = math.erfc(mean_limit(rows, chance) * math.sqrt(rows / 2))
    assert squares <= chance
    assert means <= chance
    # Not much less often either: a limit that is far too wide would be safe, and blind.
    assert (
        square_limit(rows, chance)
        <= square_limit(rows, chance / 1e3)
        <= 2.5 * square_limit(rows, chance)
    )
    assert squares >= chance**2 / rows
    assert means >= chance**2


@pytest.mark.parametrize("width", [1, 8])
def test_uniform_errors_pass_the_limits_less_often_than_promised(width: int) -> None:
    """10,000 campaigns of 50 rows, each row one sum of uniform errors seen in several columns, at a
    chance that can be seen."""
    torch.manual_seed(width)
    campaigns, rows, chance = 10_000, 50, 0.02
    z = (torch.rand(campaigns, rows, width) * 2 - 1).sum(-1) / UNIFORM / width**0.5
    assert float(z.square().mean()) == pytest.approx(1, abs=0.01)
    assert float((z.square().mean(-1) > square_limit(rows, chance)).double().mean()) <= chance
    assert float((z.mean(-1).abs() > mean_limit(rows, chance)).double().mean()) <= chance


def test_notes_come_late_enough() -> None:
    """Rows of the least error seem to be of half of it less often than promised, where a note is
    first possible."""
    torch.manual_seed(0)
    share = 0.9
    rows = math.ceil(rows_for_note(share))
    means = torch.stack([torch.randn(rows).square().mean() for _ in range(2000)])
    assert float(means.min()) > 1 - share / 2
    assert rows_for_note(0.0) == math.inf


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_half_a_place_is_what_a_cast_loses(name: str) -> None:
    torch.manual_seed(1)
    dtype = dtype_named(name)
    x = torch.cat([torch.randn(4000), torch.randn(4000) * 2.0**dtype.emin]).double()
    error = (x.to(dtype.torch).double() - x).abs()
    half = half_place(x, dtype)
    assert bool((error <= half).all())
    # Uniform: half of the largest possible on average, and as much for every number of places.
    assert float((error / half).mean()) == pytest.approx(0.5, abs=0.02)


def test_rows_are_spread_and_few() -> None:
    assert chosen(300, 1, 1.0, 7).tolist() == sorted(set(chosen(300, 1, 1.0, 7).tolist()))
    assert len(chosen(300, 1, 1.0, 7)) == 64
    assert len(chosen(300, 40, 1.0, 7)) == 1
    assert len(chosen(5, 1, 1.0, 7)) == 5
    assert int(chosen(300, 1, 1.0, 7).max()) < 300
    assert len(chosen(300, 1, 1e9, 7)) == 0  # one row alone would cost too much
    assert len(chosen(0, 1, 1.0, 7)) == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", None),
        (",dist=equal_rows", "distribution"),
        (",dist=small_integers", "distribution"),
        (",lk=bhsd.xh", "expanded"),
        (",scale=0.0", "softmax_scale"),
    ],
)
def test_rows_whose_errors_depend_on_each_other_are_left_out(text: str, reason: str | None) -> None:
    found = unsuited(Problem.parse(f"sq=8,skv=8,d=16,dtype=float16{text}"))
    assert found is None if reason is None else found is not None and reason in found


def test_a_problem_without_keys_has_no_rows_to_judge() -> None:
    assert unsuited(Problem.parse("sq=8,skv=0,d=16,dtype=float16")) == "no query has a key"


# Pools


def verdict(seed: int = 1, config: str = "a", rows: float = ROWS, **sums: float) -> Verdict:
    """A case of honest rows; sums: means over rows in place of them."""
    problem = f"sq=8,skv=64,d=16,dtype=float16,seed={seed}"
    means = {"z2": 0.8, "z": 0.0, "toward": 0.0, "slack": 0.05, "least": 1.2, "share": 0.5} | sums
    return Verdict(
        case=f"mine:{config}:accuracy:{problem}",
        variant="mine",
        config=config,
        dtype="float16",
        oracle="bound",
        group="accuracy",
        outcome="pass",
        phase="generate",
        problem=problem,
        measures={"rows_out": rows, **{f"{name}_out": rows * mean for name, mean in means.items()}},
    )


def only(*verdicts: Verdict) -> Pool:
    (pool,) = pools(verdicts)
    return pool


def test_pools_add_rows_of_different_seeds() -> None:
    pool = only(verdict(1, z2=0.5), verdict(2, z2=1.1, rows=ROWS / 2))
    assert (pool.rows, pool.cases) == (3000, 2)
    assert pool.rms == pytest.approx(math.sqrt(0.7))
    assert not list(pool.excesses)
    assert pools([replace(verdict(), measures={"r_out": 0.5})]) == []


def test_cases_that_share_values_count_once() -> None:
    """A seed's values are the same in every shape, and so may be whole rows; configs that err alike
    are no evidence."""
    twice = verdict(1, rows=100.0, z2=50.0)
    assert only(verdict(1), replace(twice, problem=twice.problem.replace("sq=8", "sq=4"))) == only(
        verdict(1)
    )
    assert only(verdict(1), verdict(1, "b", z2=1.6)).rms == pytest.approx(math.sqrt(1.2))
    assert only(verdict(1), verdict(1, "b")).rows == ROWS


def test_cases_chosen_for_their_errors_do_not_count() -> None:
    chosen_for_it = [
        replace(verdict(n, z2=9.0), phase=phase)
        for n, phase in enumerate(("shrink", "witness", "reuse"), 2)
    ]
    assert only(verdict(1), *chosen_for_it) == only(verdict(1))


@pytest.mark.parametrize(
    ("sums", "test", "words"),
    [
        ({"z2": 1.8}, "rms", "root of the mean square"),
        ({"z": 0.4}, "mean", "mean of error"),
        ({"z": -0.4, "toward": -0.4}, "mean", "too small"),
        ({"toward": 0.4}, "toward", "too large"),
        ({"weight": 0.3, "weighed": 0.54}, "weighed", "weighted by"),
    ],
)
def test_what_honest_arithmetic_does_not_do_is_found(
    sums: dict[str, float], test: str, words: str
) -> None:
    assert next(name for name, _, _ in only(verdict(**sums)).excesses) == test
    (found,) = findings([verdict(2), verdict(1, rows=4 * ROWS, **sums)])
    assert found.finding is not None
    assert words in found.finding.message
    assert "seed=1" in found.finding.replay
    assert (found.oracle, found.outcome, found.counted) == ("statistics", "fail", True)
    # The same of a few rows says nothing.
    assert findings([verdict(rows=40.0, **sums)]) == []


def test_a_weighed_mean_has_the_limit_of_as_many_rows_as_its_weights_are() -> None:
    pool = only(verdict(weight=0.25, weighed=0.2, rows=ROWS))
    assert pool.weighed == pytest.approx(math.sqrt(0.8))
    assert pool.weighed_limit == pytest.approx(only(verdict(rows=ROWS / 4)).rms_limit)
    # evidence of an earlier day has no weights, and no limit
    assert only(verdict()).weighed_limit == math.inf


def test_what_is_allowed_is_allowed() -> None:
    """The same mean is no finding where the model cannot tell it from truncation."""
    assert findings([verdict(z=-0.4, toward=-0.4, slack=0.5)]) == []


def test_smaller_errors_than_declared_are_noted_and_do_not_fail() -> None:
    pool = only(verdict(least=0.55, z2=0.4))
    assert pool.too_good
    assert not list(pool.excesses)
    assert not only(verdict(least=0.55, z2=0.4, rows=50.0)).too_good
    assert not only(verdict(least=0.95)).too_good
    # nothing but the last rounding: nothing to be too good at
    assert not only(verdict(least=0.0, share=0.0)).too_good


# A run


def record(run: CampaignRun, *verdicts: Verdict) -> None:
    with Recorder(run.directory) as recorder:
        recorder.write(
            RunInfo(run="r", started="20260101T000000Z", profile="dev", device={"slug": "here"})
        )
        for one in verdicts:
            recorder.write(one)


def test_a_biased_campaign_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case passes; the campaign does not, in evidence and report, and no known failure is
    made of it."""
    monkeypatch.chdir(tmp_path)
    run = CampaignRun(tmp_path / ".verify" / "runs" / "r", "dev", ())
    record(run, *(verdict(n, toward=-0.5) for n in range(4)))
    for _ in range(2):  # made again, the report says the same
        said = write_report(run, tmp_path / "report")
        assert "1 failing" in said
    failing = [v for v in load(run.directory).verdicts if v.outcome == "fail"]
    assert [(v.oracle, v.group, v.variant, v.dtype) for v in failing] == [
        ("statistics", "campaign", "mine", "float16")
    ]
    assert not (tmp_path / ".verify" / "known-failures.txt").exists()
    report = parse(json.loads((tmp_path / "report" / "report.json").read_text()))
    (variant,) = report["variants"]
    assert variant["status"] == "red"
    assert variant["failing"][0]["oracle"] == "statistics"
    assert report["pools"][0]["failing"] == ["toward"]


def test_an_honest_campaign_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = CampaignRun(tmp_path / "run", "dev", ())
    record(run, *(verdict(n) for n in range(4)))
    assert "0 failing" in write_report(run, tmp_path / "report")
    assert len(load(run.directory).verdicts) == 4


def test_reports_show_the_pools(tmp_path: Path) -> None:
    run = CampaignRun(tmp_path / "run", "dev", ())
    record(run, verdict(least=0.55, z2=0.4))
    report = build(load(run.directory))
    assert "| **mine** | float16 | O | 2,000 | " in as_markdown(report)
    for page in (as_markdown(report), as_html(report)):
        assert "Statistics of the campaign" in page
        assert "more accurate than declared" in page


def test_reports_without_pools_are_still_read(tmp_path: Path) -> None:
    run = CampaignRun(tmp_path / "run", "dev", ())
    record(run, verdict())
    report = build(load(run.directory))
    del report["pools"]
    read = parse(json.loads(dumps(report)))
    assert "pools" not in read
    assert "Statistics of the campaign" not in as_markdown(read)
