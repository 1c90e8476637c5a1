"""Certificates in a report: the least strength and its case; power that fell is a regression."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from tests.harness.fake_campaign import BINS, evidence, verdict
from tests.harness.rendered import as_markdown, table
from verify.document import Table
from verify.report import (
    Report,
    build,
    compare,
    dumps,
    parse,
    plots,
    power_plot,
    render_comparison,
    replays,
)
from verify.report.document import document
from verify.report.headline import headline
from verify.report.power import FAULTS

ONE, OTHER = ("triton-fwd", "float16"), ("torch-flash", "float16")


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "ratio_plot", lambda report: None)
    monkeypatch.setattr(plots, "error_plot", lambda variant, key: None)
    monkeypatch.setattr(power_plot, "power_plot", lambda report: None)


def report(*cases: tuple[tuple[str, str], dict[str, float], dict[str, object]]) -> Report:
    """A report of one verdict for each (variant and dtype, measures, changes)."""
    found = []
    for at, ((ref, dtype), measures, changes) in enumerate(cases):
        made = verdict(ref, dtype, 3 * at)
        found.append(
            dataclasses.replace(made, measures=made.measures | measures, outcome="pass", **changes)
        )
    return build(dataclasses.replace(evidence(0), verdicts=tuple(found)), BINS)


def test_the_least_strength_counts_and_names_its_case() -> None:
    found = report(
        (ONE, {"power_scale": 3e-5, "tutorial_scale": 0.02}, {}),
        (ONE, {"power_scale": 2e-5, "tutorial_scale": 0.03, "power_out": 1e-3}, {}),
        (ONE, {"power_scale": 1e-9}, {"phase": "shrink"}),
        (OTHER, {"power_lse": 4e-5, "power_of_tomorrow": 1.0}, {}),
    )
    assert [(p["variant"], p["fault"], p["strength"], p["cases"]) for p in found["power"]] == [
        ("torch-flash", "lse", 4e-5, 1),
        ("triton-fwd", "scale", 2e-5, 2),
        ("triton-fwd", "out", 1e-3, 1),
    ]
    scale = found["power"][1]
    assert scale["case"] == verdict(*ONE, 3).case
    assert replays.command(scale).endswith(f" {scale['case']}")
    assert (scale["tutorial"], scale["close"]) == (0.02, None)
    assert parse(json.loads(dumps(found))) == found
    rows = table(as_markdown(found), "## Power")  # beside other suites' rules
    assert [row[0] for row in rows[2:]] == [FAULTS[name] for name in ("scale", "lse", "out")]
    (power,) = (one for one in document(found, None).sections if one.title == "Power")
    assert len([b for b in power.blocks if isinstance(b, Table)][-1].rows) == 3
    assert "e = 2.0e-05" in headline(found)


def test_exact_cases_are_counted_where_none_failed() -> None:
    asked = (("counting", 2, 0), ("gather", 3, 1), ("gather_backward", 0, 0))
    found = report((ONE, {"power_scale": 3e-5}, {}))
    dtype = found["variants"][0]["dtypes"][0]
    dtype["oracles"] += [
        {"oracle": name, "group": group, "cases": cases, "failures": failures, "inapplicable": 0}
        for name, cases, failures in asked
        for group in ("one", "two")
    ]
    (power,) = (one for one in document(found, None).sections if one.title == "Power")
    counted = [block for block in power.blocks if isinstance(block, Table)][-1]
    assert counted.columns == ("variant", "dtype", "counting", "gather", "gather_backward")
    ((_, _, *counts),) = counted.rows
    assert [cell.value for cell in counts] == [4, None, None]  # type: ignore[union-attr]
    dtype["oracles"][-6]["failures"] = 1
    (power,) = (one for one in document(found, None).sections if one.title == "Power")
    assert counted.columns not in [b.columns for b in power.blocks if isinstance(b, Table)]


def test_a_failing_case_certifies_nothing() -> None:
    found = report((ONE, {"power_scale": 3e-5}, {}))
    failing = dataclasses.replace(
        verdict(*ONE, 0), measures={"power_scale": 1e-9}, outcome="fail", finding=None
    )
    whole = build(dataclasses.replace(evidence(0), verdicts=(failing,)), BINS)
    assert found["power"]
    assert whole["power"] == []


def test_evidence_of_an_earlier_day_has_no_section() -> None:
    found = report((ONE, {}, {}))
    assert found["power"] == []
    assert "## Power" not in as_markdown(found)
    del found["power"]
    assert "## Power" not in as_markdown(found)
    assert "would have failed" not in headline(found)


def test_power_that_fell_is_a_regression() -> None:
    def at(**strengths: float) -> Report:
        measures = {f"power_{fault}": e for fault, e in strengths.items()}
        return report((ONE, measures, {}))

    old = at(scale=2e-5, out=1e-3)
    fell = compare(old, at(scale=4e-5, out=1e-3))
    assert fell.regressed
    assert [(c.oracle, c.measure, c.ratio) for c in fell.worse] == [("power", "power_scale", 2.0)]
    for form in ("text", "markdown"):
        assert "smallest fault noticed" in render_comparison(fell, form)
    lost = compare(old, at(scale=2e-5))
    assert [(c.measure, c.ratio) for c in lost.worse] == [("power_out", math.inf)]
    gone = compare(old, at())
    assert gone.gone == ((*ONE, "power"),)
    rose = compare(at(scale=4e-5, out=1e-3), old)
    assert not rose.regressed
    assert [c.measure for c in rose.better] == ["power_scale"]
    without = at()
    del without["power"]
    assert not compare(without, old).regressed  # a report of an earlier day says nothing
