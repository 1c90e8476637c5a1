"""Builds in a report's data: a row for each architecture, and failed compiles."""

import dataclasses
from dataclasses import asdict

import pytest

from tests.harness.fake_campaign import ARCHES, BINS, built, evidence, of
from verify.report import Report, build
from verify.variant import Resources


@pytest.fixture(scope="module")
def report() -> Report:
    return build(evidence(), BINS)


def needs(*numbers: int) -> dict[str, int]:
    """Resources as data."""
    return asdict(Resources(*numbers))


class TestBuilds:
    def test_one_row_per_architecture(self, report):
        rows = of(report, "triton-fwd")["builds"]
        assert [row["arch"] for row in rows] == list(ARCHES)
        assert all((row["builds"], row["compiled"], row["failing"]) == (2, 2, []) for row in rows)
        spilling = {
            row["arch"]: (
                row["spilling"],
                row["spill_build"],
                row["spill_stores"],
                row["spill_loads"],
            )
            for row in rows
        }
        assert spilling.pop("sm_90a") == (1, "m128n64-float16-d256", 96, 128)
        assert set(spilling.values()) == {(0, "", 0, 0)}

    def test_the_largest_and_the_worst(self):
        found = [
            built("triton-fwd", "sm_80", "a", resources=needs(64, 9, 8, 4, 4)),
            built("triton-fwd", "sm_80", "b", resources=needs(32, 99, 0, 0, 9)),
            built("triton-fwd", "sm_80", "c", resources=None, error="no"),
        ]
        (row,) = of(
            build(dataclasses.replace(evidence(), builds=tuple(found)), BINS), "triton-fwd"
        )["builds"]
        assert (row["registers"], row["shared"], row["stack"], row["seconds"]) == (64, 99, 8, 4.5)
        assert (row["spilling"], row["spill_build"], row["spill_stores"], row["spill_loads"]) == (
            2,
            "b",
            0,
            9,
        )

    def test_a_failed_compile_is_red(self):
        found = evidence()
        broken = built("torch-flash", "sm_80", resources=None, error="ptxas: no")
        red = build(dataclasses.replace(found, builds=(broken,)), BINS)
        variant = of(red, "torch-flash")
        assert (variant["status"], variant["reasons"], red["status"]) == (
            "red",
            ["sm_80: 1 of 1 builds fail"],
            "red",
        )
        assert all(d["status"] == "green" for d in variant["dtypes"])
        assert (variant["builds"][0]["registers"], variant["builds"][0]["error"]) == (
            None,
            "ptxas: no",
        )

    def test_a_failed_compile_of_a_variant_that_cannot_run_here_is_red(self):
        found = evidence()
        kept = tuple(v for v in found.verdicts if v.variant == "torch-flash")
        entries = tuple(e for e in found.variants if e.ref in ("torch-flash", "gluon-hopper"))
        some = dataclasses.replace(
            found, variants=entries, verdicts=kept, lost=(), not_run=(), builds=()
        )
        assert build(some, BINS)["status"] == "green"
        broken = dataclasses.replace(
            some, builds=(built("gluon-hopper", "sm_90a", resources=None, error="no"),)
        )
        red = build(broken, BINS)
        assert (red["status"], of(red, "gluon-hopper")["status"]) == ("red", "red")
        assert of(red, "gluon-hopper")["reasons"] == [
            "unavailable: needs compute capability 9.0",
            "sm_90a: 1 of 1 builds fail",
        ]

    def test_a_build_left_out_is_no_failure(self, report):
        (row,) = of(report, "ptx-mma")["builds"]
        assert (row["builds"], row["compiled"], row["failing"], row["error"]) == (2, 1, [], "")

    def test_of_a_variant_with_no_declaration(self):
        found = build(dataclasses.replace(evidence(), builds=(built("stranger", "sm_80"),)), BINS)
        assert of(found, "stranger")["builds"][0]["compiled"] == 1

    def test_a_long_message_is_cut(self):
        broken = built("triton-fwd", "sm_80", resources=None, error="x" * 100_000)
        found = build(dataclasses.replace(evidence(), builds=(broken,)), BINS)
        assert len(of(found, "triton-fwd")["builds"][0]["error"]) < 5000
