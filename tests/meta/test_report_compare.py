"""Reports against each other, and what CI computes again."""

import dataclasses
import math

import pytest

from tests.meta.synthetic import BINS, entry, evidence, verdict
from verify.problem import Problem
from verify.report import Report, ReportError, build, compare, render_comparison, worst_cases


@pytest.fixture(scope="module")
def report() -> Report:
    return build(evidence(), BINS)


class TestCompare:
    def test_equal_reports(self, report):
        found = compare(report, report)
        assert not found.regressed
        assert not any((found.worse, found.better, found.stale, found.newly_failing, found.newly_covered))
        assert "no regression" in render_comparison(found)

    def test_worse_and_better(self):
        old, new = (build(evidence(worse=factor), BINS) for factor in (1.0, 1.5))
        there, back = compare(old, new), compare(new, old)
        assert {(c.variant, c.measure) for c in there.worse} >= {("triton-fwd", "r_out"), ("torch-flash", "r_out")}
        assert all(c.ratio == pytest.approx(1.5) for c in there.worse)
        assert [(c.variant, c.dtype) for c in back.better] == [(c.variant, c.dtype) for c in there.worse]
        assert there.regressed
        assert not back.regressed
        assert not compare(old, new, threshold=1.6).worse

    def test_failures_bins_variants_and_sources(self):
        old, found = evidence(), evidence()
        kept = [v for v in found.verdicts if v.outcome == "pass" and v.variant != "torch-flash"]
        kept = [
            dataclasses.replace(v, bins=tuple(b for b in v.bins if b != "gqa")) if v.variant == "triton-fwd" else v
            for v in kept
        ]
        entries = [
            dataclasses.replace(e, source_hash="new") if e.ref == "triton-fwd" else e
            for e in found.variants
            if e.ref != "torch-flash"
        ]
        new = dataclasses.replace(found, verdicts=tuple(kept), variants=(*entries, entry("triton-new")))
        there, back = compare(build(old, BINS), build(new, BINS)), compare(build(new, BINS), build(old, BINS))
        assert there.newly_passing == back.newly_failing == (("triton-tutorial", "bfloat16", "forward (bound)"),)
        assert (
            there.newly_uncovered == back.newly_covered == (("triton-fwd", "bfloat16", "gqa"), ("triton-fwd", "float16", "gqa"))
        )
        assert (there.added, there.removed, there.stale) == (("triton-new",), ("torch-flash",), ("triton-fwd",))
        for form in ("text", "markdown"):
            shown = render_comparison(there, form)
            assert "Newly passing" in shown
            assert "stale" in shown

    def test_one_oracle_in_two_groups(self, report):
        found = evidence()
        extra = [dataclasses.replace(v, oracle="memory", measures={}) for v in found.verdicts if v.variant == "triton-fwd"]
        bad = [dataclasses.replace(v, outcome="fail") if v.group == "bound" else v for v in extra]
        old, new = (build(dataclasses.replace(found, verdicts=(*found.verdicts, *more)), BINS) for more in (extra, bad))
        failing = compare(old, new).newly_failing
        assert failing == (("triton-fwd", "bfloat16", "memory (bound)"), ("triton-fwd", "float16", "memory (bound)"))

    def test_a_dtype_no_longer_judged(self, report):
        found = evidence()
        fewer = build(dataclasses.replace(found, verdicts=tuple(v for v in found.verdicts if v.dtype != "bfloat16")), BINS)
        assert ("triton-fwd", "bfloat16", "forward (bound)") in compare(report, fewer).gone

    def test_not_a_number_is_worse_than_any(self):
        verdicts = {r: (verdict("triton-fwd", "float16", 0, measures={"r_out": r}),) for r in (0.5, math.inf, math.nan)}
        reports = {r: build(dataclasses.replace(evidence(), verdicts=v), BINS) for r, v in verdicts.items()}
        half, infinite, nothing = reports.values()
        assert compare(half, infinite).worse
        assert compare(half, nothing).worse
        assert compare(infinite, nothing).worse
        assert compare(nothing, half).better
        assert not compare(nothing, nothing).worse

    def test_small_values_are_of_no_interest(self):
        small, double = (
            build(dataclasses.replace(evidence(), verdicts=(verdict("triton-fwd", "float16", 0, measures={"r_out": r}),)), BINS)
            for r in (0.003, 0.009)
        )
        assert not compare(small, double).worse

    def test_devices_and_threshold(self, report):
        other = report | {"device": {"slug": "cpu-x86_64"}}
        assert "different devices" in render_comparison(compare(report, other))
        with pytest.raises(ReportError, match="threshold"):
            compare(report, report, threshold=1.0)


def test_worst_cases(report):
    found = worst_cases(report)
    assert found == sorted(found, key=lambda w: (w.variant, found.index(w)))
    assert {(w.variant, w.dtype) for w in found} == {
        *((ref, dtype) for ref in ("torch-flash", "triton-fwd", "triton-tutorial") for dtype in ("float16", "bfloat16")),
        ("ptx-mma", "float16"),
    }
    for worst in found:
        assert worst.case.endswith(worst.problem)
        assert Problem.parse(worst.problem).dtype == worst.dtype
        assert None not in (worst.r_out, worst.r_lse)
