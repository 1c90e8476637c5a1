"""Plots of gradients."""

import dataclasses
import math
import re

import pytest

from tests.harness.fake_campaign import BINS, evidence, of, verdict
from verify.report import Report, build, plots


@pytest.fixture(scope="module")
def report() -> Report:
    return build(evidence(), BINS)


class TestPlots:
    def test_gradients_have_a_panel_of_their_own(self, report):
        image = plots.ratio_plot(report)
        assert ">Gradients dQ, dK, dV<" in image
        assert image.count(">float16 dK<") == 1
        forward = [v for v in report["variants"] if v["ref"] != "triton-backward"]
        assert ">Gradients dQ, dK, dV<" not in plots.ratio_plot(report | {"variants": forward})

    def test_a_backward_alone(self, report):
        image = plots.ratio_plot(report | {"variants": [of(report, "triton-backward")]})
        assert ">Gradients dQ, dK, dV<" in image
        assert ">Output O<" not in image

    def test_error_plot_has_a_row_per_gradient(self, report):
        image = plots.error_plot(of(report, "triton-backward"), "v")
        assert [f"largest error of {name}" in image for name in ("O", "dQ", "dK", "dV")] == [
            False,
            True,
            True,
            True,
        ]
        assert "largest error of O" in plots.error_plot(of(report, "triton-fwd"), "v")

    def test_a_tiny_error_does_not_squeeze_the_others(self):
        def lowest(tiny: float) -> float:
            measures = [
                {"seqlen_kv": 4.0, "max_error_out": size, "error_bound_out": size}
                for size in (1e-3, tiny)
            ]
            made = [
                verdict("triton-fwd", "float16", 3 * i, measures=found)
                for i, found in enumerate(measures)
            ]
            image = plots.error_plot(
                of(
                    build(dataclasses.replace(evidence(), verdicts=tuple(made)), BINS), "triton-fwd"
                ),
                "v",
            )
            return min(float(tick) for tick in re.findall(r">1?(\de-?\d+)<", image))

        assert lowest(1e-37) == lowest(1e-13)
        assert lowest(1e-37) >= 1e-14
        assert lowest(1e-6) > 1e-8

    def test_infinite_and_missing_gradients_draw(self):
        changes = [
            {"r_dq": math.inf, "max_error_dq": math.inf},
            {"r_dk": 0.0, "max_error_dk": 0.0},
            {"r_dv": math.nan},
        ]
        made = [
            verdict("triton-fwd", "float16", 3 * i, measures={"seqlen_kv": 4.0} | c)
            for i, c in enumerate(changes)
        ]
        found = build(dataclasses.replace(evidence(), verdicts=tuple(made)), BINS)
        assert "<svg" in plots.ratio_plot(found)
        assert plots.error_plot(of(found, "triton-fwd"), "v") is None

    def test_variant_names_stand_clear_of_long_dtypes(self, report):
        assert "float8_e4m3fn" in plots.ratio_plot(report)
