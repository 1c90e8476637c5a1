"""Ranking by errors in ulp: pooled over cases, ranked within a dtype; old reports have none."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest

from tests.harness.fake_campaign import BINS, evidence, ulps, verdict
from tests.harness.rendered import as_html, as_markdown, table
from verify.report import Report, build, dumps, parse, plots
from verify.report.beside import Beside
from verify.report.sections import ranking


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "ratio_plot", lambda report: None)
    monkeypatch.setattr(plots, "error_plot", lambda variant, key: None)


def report(medians: dict[tuple[str, str], list[float]]) -> Report:
    """Cases with these medians of each (variant, dtype)."""
    found = [
        dataclasses.replace(one, measures=one.measures | ulps(median))
        for (ref, dtype), several in medians.items()
        for at, median in enumerate(several)
        for one in [verdict(ref, dtype, 3 * at)]
    ]
    return build(dataclasses.replace(evidence(0), verdicts=tuple(found)), BINS)


MEDIANS = {
    ("triton-fwd", "float16"): [0.3, 0.2, 0.4],
    ("torch-flash", "float16"): [0.9, 0.1, 0.8],
    ("ptx-mma", "float16"): [0.15],
    ("triton-fwd", "bfloat16"): [0.5],
}


def test_the_median_of_medians_and_of_tails_and_the_worst_tail() -> None:
    (one,) = [
        one
        for one in report(MEDIANS)["accuracy"]
        if (one["variant"], one["dtype"]) == ("torch-flash", "float16")
    ]
    assert one == {
        "variant": "torch-flash",
        "dtype": "float16",
        "cases": 3,
        "ulp50": 0.8,
        "ulp99": 3.2,
        "ulp99_worst": 3.6,
        "best50": 0.12,
        "best99": 0.49,
    }


def test_ranks_are_of_a_dtype_and_stand_first_after_the_verdicts() -> None:
    found = report(MEDIANS)
    page = as_markdown(found)
    _, _, *rows = table(page, "## Ranking")
    assert [row[:4] for row in rows] == [
        ["1", "**triton-fwd**", "bfloat16", "0.5"],
        ["1", "**ptx-mma**", "float16", "0.15"],
        ["2", "**triton-fwd**", "float16", "0.3"],
        ["3", "**torch-flash**", "float16", "0.8"],
    ]
    assert re.findall(r"(?m)^## (.*)$", page)[:2] == ["Verdicts", "Ranking"]
    assert '<h2 id="ranking">Ranking' in as_html(found)


def test_kernels_that_are_infinitely_far_off_are_last() -> None:
    found = report(MEDIANS | {("ptx-mma", "float16"): [math.inf], ("a", "float16"): [math.nan]})
    rows = table(as_markdown(found), "## Ranking")[2:]
    assert [row[1] for row in rows if row[2] == "float16"][-2:] == ["**ptx-mma**", "**a**"]
    assert parse(json.loads(dumps(found)))["accuracy"]


def test_reports_of_an_earlier_day_say_that_it_was_not_measured() -> None:
    old = report(MEDIANS)
    del old["accuracy"]
    rows = table(as_markdown(old), "## Ranking")[2:]
    assert {row[3] for row in rows} == {"not measured"}
    assert len(rows) == len(MEDIANS)
    assert "<td>not measured<td>" in as_html(old)


def test_shrinking_and_gradients_do_not_count() -> None:
    shrunk = dataclasses.replace(verdict("triton-fwd", "float16", 3), phase="shrink")
    assert ranking.section(report({}), Beside()) is None
    found = build(dataclasses.replace(evidence(0), verdicts=(shrunk,)), BINS)
    assert found["accuracy"] == []
