"""Reports against each other."""

import dataclasses
import math

import pytest

from tests.harness.fake_campaign import BINS, built, entry, evidence, verdict
from verify.report import Report, ReportError, build, compare, render_comparison


@pytest.fixture(scope="module")
def report() -> Report:
    return build(evidence(), BINS)


class TestCompare:
    def test_equal_reports(self, report):
        found = compare(report, report)
        assert not found.regressed
        assert not any(
            (found.worse, found.better, found.stale, found.newly_failing, found.newly_covered)
        )
        assert "no regression" in render_comparison(found)

    def test_worse_and_better(self):
        old, new = (build(evidence(worse=factor), BINS) for factor in (1.0, 1.5))
        there, back = compare(old, new), compare(new, old)
        assert {(c.variant, c.measure) for c in there.worse} >= {
            ("triton-fwd", "r_out"),
            ("torch-flash", "r_out"),
            ("triton-backward", "r_dk"),
        }
        assert not [c for c in there.worse if c.measure in ("r_dq", "r_dv")]
        assert all(c.ratio == pytest.approx(1.5) for c in there.worse)
        assert [(c.variant, c.dtype) for c in back.better] == [
            (c.variant, c.dtype) for c in there.worse
        ]
        assert there.regressed
        assert not back.regressed
        assert not compare(old, new, threshold=1.6).worse

    def test_failures_bins_variants_and_sources(self):
        old, found = evidence(), evidence()
        kept = [v for v in found.verdicts if v.outcome == "pass" and v.variant != "torch-flash"]
        kept = [
            dataclasses.replace(v, bins=tuple(b for b in v.bins if b != "gqa"))
            if v.variant == "triton-fwd"
            else v
            for v in kept
        ]
        entries = [
            dataclasses.replace(e, source_hash="new") if e.ref == "triton-fwd" else e
            for e in found.variants
            if e.ref != "torch-flash"
        ]
        new = dataclasses.replace(
            found, verdicts=tuple(kept), variants=(*entries, entry("triton-new"))
        )
        there, back = (
            compare(build(old, BINS), build(new, BINS)),
            compare(build(new, BINS), build(old, BINS)),
        )
        assert (
            there.newly_passing
            == back.newly_failing
            == (("triton-tutorial", "bfloat16", "forward (bound)"),)
        )
        assert (
            there.newly_uncovered
            == back.newly_covered
            == (("triton-fwd", "bfloat16", "gqa"), ("triton-fwd", "float16", "gqa"))
        )
        assert (there.added, there.removed, there.stale) == (
            ("triton-new",),
            ("torch-flash",),
            ("triton-fwd",),
        )
        for form in ("text", "markdown"):
            shown = render_comparison(there, form)
            assert "Newly passing" in shown
            assert "stale" in shown

    def test_gradients_newly_failing(self):
        old = evidence()
        bad = [
            dataclasses.replace(v, outcome="fail") if v.group == "gradients" else v
            for v in old.verdicts
        ]
        found = compare(
            build(old, BINS), build(dataclasses.replace(old, verdicts=tuple(bad)), BINS)
        )
        assert found.newly_failing == tuple(
            ("triton-backward", dtype, "gradient_bound (gradients)")
            for dtype in ("float16", "float32")
        )

    def test_builds(self):
        old = evidence()
        changed = [b for b in old.builds if (b.variant, b.arch) != ("triton-fwd", "sm_80")]
        changed = [b for b in changed if b.variant != "gluon-hopper"]
        changed += [
            built("triton-fwd", "sm_80", spill=(8, 8)),
            built("gluon-hopper", "sm_90a", resources=None, error="no"),
        ]
        new = dataclasses.replace(
            old, builds=tuple(b for b in changed if b.variant != "triton-backward")
        )
        there, back = (
            compare(build(old, BINS), build(new, BINS)),
            compare(build(new, BINS), build(old, BINS)),
        )
        assert (
            there.newly_failing == back.newly_passing == (("gluon-hopper", "sm_90a", "compiler"),)
        )
        assert there.gone == (("triton-backward", "sm_90a", "compiler"),)
        (worse,) = there.worse
        assert (worse.variant, worse.dtype, worse.measure, worse.old, worse.new) == (
            "triton-fwd",
            "sm_80",
            "spill",
            0,
            16,
        )
        assert [c.ratio for c in back.better] == [0]
        assert "spilled bytes" in render_comparison(there)

    def test_one_oracle_in_two_groups(self, report):
        found = evidence()
        extra = [
            dataclasses.replace(v, oracle="memory", measures={})
            for v in found.verdicts
            if v.variant == "triton-fwd"
        ]
        bad = [dataclasses.replace(v, outcome="fail") if v.group == "bound" else v for v in extra]
        old, new = (
            build(dataclasses.replace(found, verdicts=(*found.verdicts, *more)), BINS)
            for more in (extra, bad)
        )
        failing = compare(old, new).newly_failing
        assert failing == (
            ("triton-fwd", "bfloat16", "memory (bound)"),
            ("triton-fwd", "float16", "memory (bound)"),
        )

    def test_a_dtype_no_longer_judged(self, report):
        found = evidence()
        fewer = build(
            dataclasses.replace(
                found, verdicts=tuple(v for v in found.verdicts if v.dtype != "bfloat16")
            ),
            BINS,
        )
        assert ("triton-fwd", "bfloat16", "forward (bound)") in compare(report, fewer).gone

    def test_not_a_number_is_worse_than_any(self):
        verdicts = {
            r: (verdict("triton-fwd", "float16", 0, measures={"r_out": r}),)
            for r in (0.5, math.inf, math.nan)
        }
        reports = {
            r: build(dataclasses.replace(evidence(), verdicts=v), BINS) for r, v in verdicts.items()
        }
        half, infinite, nothing = reports.values()
        assert compare(half, infinite).worse
        assert compare(half, nothing).worse
        assert compare(infinite, nothing).worse
        assert compare(nothing, half).better
        assert not compare(nothing, nothing).worse

    def test_small_values_are_of_no_interest(self):
        small, double = (
            build(
                dataclasses.replace(
                    evidence(),
                    verdicts=(verdict("triton-fwd", "float16", 0, measures={"r_out": r}),),
                ),
                BINS,
            )
            for r in (0.003, 0.009)
        )
        assert not compare(small, double).worse

    def test_devices_and_threshold(self, report):
        other = report | {"device": {"slug": "cpu-x86_64"}}
        assert "different devices" in render_comparison(compare(report, other))
        with pytest.raises(ReportError, match="threshold"):
            compare(report, report, threshold=1.0)

    def test_a_report_of_the_days_of_coarse_names_is_of_the_same_cpu(self, report):
        old, new = (
            report | {"device": {"slug": s, "name": "AMD EPYC 7B13"}}
            for s in ("cpu-x86_64", "cpu-amd-epyc-7b13")
        )
        assert compare(old, new).same_device
        assert not compare(
            old, new | {"device": {"slug": "cpu-amd-epyc-9b14", "name": "AMD EPYC 9B14"}}
        ).same_device
