"""Budgets and instructions of builds: the report's data and its section."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.harness.fake_campaign import BINS, built, evidence, of
from tests.harness.rendered import as_html, as_markdown, table
from verify.evidence import Built
from verify.report import Report, build, dumps, outcome, parse
from verify.report.headline import failures
from verify.report.resources import KINDS
from verify.report.sections import builds

CONFIG = "m128n64w8s2"
LOOP = {"MMA": 8, "HMMA": 8, "FP32": 20, "INT": 4, "MUFU": 4, "total": 40}
KERNEL = {"MMA": 8, "HMMA": 8, "FP32": 30, "INT": 50, "MUFU": 6, "total": 128}
WIDE = {"MMA": 2, "HGMMA": 2, "FP32": 60, "total": 92}
BUSY = LOOP | {"total": 56, "INT": 12}


def read(build_: str, *, loop: dict[str, int] = LOOP, arch: str = "sm_90a", **changes) -> Built:
    """A build of triton-fwd whose instructions were read."""
    sass = {"kernel": KERNEL, "loop": loop}
    return built("triton-fwd", arch, f"{CONFIG}, {build_}", **({"sass": sass} | changes))


def made(*records: Built) -> Report:
    """The fake campaign with these builds alone."""
    found = evidence()
    variants = tuple(
        dataclasses.replace(entry, configs=(CONFIG, "m128")) if entry.ref == "triton-fwd" else entry
        for entry in found.variants
    )
    return build(dataclasses.replace(found, variants=variants, builds=records), BINS)


@pytest.fixture(scope="module")
def report() -> Report:
    return made(
        read("d 64"),
        read("d 128", loop=BUSY),
        read("no loop", loop={}),
        read("no mma", sass={"kernel": {"FP32": 3, "total": 9}, "loop": {}}),
        read("elsewhere", arch="sm_80"),
        read("wgmma", sass={"kernel": WIDE, "loop": WIDE}),
        read("unread", sass=None, unread="no nvdisasm"),
    )


def test_ratios_are_ranges_over_the_builds_of_a_config(report: Report) -> None:
    wide, row = of(report, "triton-fwd")["builds"][1]["instructions"]
    assert (wide["mma"], wide["builds"], wide["other"]) == (["HGMMA"], 1, [45.0, 45.0])
    assert row == {
        "config": CONFIG,
        "builds": 3,
        "mma": ["HMMA"],
        "other": [15.0, 15.0],
        "other_loop": [4.0, 6.0],
        "arithmetic": [10.0, 10.0],
        "arithmetic_loop": [3.0, 4.0],
    }


@pytest.mark.for_ci
def test_the_section_shows_the_devices_architecture(report: Report) -> None:
    page = as_markdown(report)
    lines = [
        line for line in page.splitlines() if line.startswith(f"| **triton-fwd** | `{CONFIG}`")
    ]
    wide, cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert cells[:4] == ["**triton-fwd**", f"`{CONFIG}`", "3", "HMMA"]
    assert wide[2:5] == ["1", "HGMMA", "45.00"]
    assert cells[4:] == ["4.00 .. 6.00", "15.00", "3.00 .. 4.00", "10.00"]
    for text in (page, as_html(report)):
        assert "on sm_90a" in text
        assert "Instructions of 1 compiled builds were not read: no nvdisasm." in text


def test_the_numbers_of_kinds_are_ranges_over_the_builds_that_were_read(report: Report) -> None:
    elsewhere, here = of(report, "triton-fwd")["builds"]
    assert here["kinds"] == {kind: [0, 6] if kind == "MUFU" else [0, 0] for kind in KINDS}
    assert elsewhere["kinds"]["MUFU"] == [6, 6]
    rows = [line for line in as_markdown(report).splitlines() if "| sm_90a | HGMMA, HMMA |" in line]
    assert [cell.strip() for cell in rows[0].strip("|").split("|")] == [
        *("**triton-fwd**", "sm_90a", "HGMMA, HMMA", "0", "0", "0", "0 .. 6", "0", "0"),
    ]
    nothing_read = made(read("unread", sass=None, unread="no nvdisasm"))
    assert of(nothing_read, "triton-fwd")["builds"][0]["kinds"] == {}
    assert "LDGSTS" not in as_markdown(nothing_read)


@pytest.mark.for_ci
def test_a_build_over_its_budget_fails_the_report() -> None:
    over = read("d 64", spill=(96, 128), spill_budget=64, error="spills 96 + 128 bytes")
    report = made(over, read("d 128"))
    (row,) = of(report, "triton-fwd")["builds"]
    assert (row["builds"], row["compiled"], row["failing"]) == (2, 1, [over.build])
    assert (row["spill_budget"], row["error"]) == (64, "spills 96 + 128 bytes")
    variant = of(report, "triton-fwd")
    assert (variant["status"], variant["reasons"]) == ("red", ["sm_90a: 1 of 2 builds fail"])
    assert failures(report).new == failures(made(read("d 128"))).new + 1
    assert "triton-fwd" in outcome.failing(report)
    (cells,) = table(as_markdown(report), "## Builds")[2:]
    assert cells[8:10] == ["96 + 128", "64"]
    assert "spills 96 + 128 bytes" in as_html(report)


def test_no_budget_is_said() -> None:
    report = made(read("d 64", spill=(8, 8), spill_budget=None))
    (cells,) = table(as_markdown(report), "## Builds")[2:]
    assert cells[8:10] == ["8 + 8", "none"]


def test_an_older_report_is_read_and_shown(report: Report) -> None:
    data = json.loads(dumps(report))
    for variant in data["variants"]:
        for row in variant["builds"]:
            for field in (
                *("spill_budget", "instructions", "unread", "unread_reason"),
                "kinds",
                "same",
            ):
                del row[field]
    older = parse(data)
    assert "SASS" not in as_markdown(older)
    assert builds.section(older, None).title == "Builds"


TWIN = f"{CONFIG}-warp_specialize_1"


def compiled_as(config: str, rest: str, code: str, **changes) -> Built:
    """A build of triton-fwd of any config, with the hash of its binary."""
    sass = {"kernel": KERNEL, "loop": LOOP}
    return built(
        "triton-fwd", "sm_90a", f"{config}, {rest}", **({"sass": sass, "code": code} | changes)
    )


@pytest.mark.for_ci
def test_a_config_with_the_binaries_of_another_is_said_and_not_counted() -> None:
    report = made(
        compiled_as(CONFIG, "d 64", "aa"),
        compiled_as(CONFIG, "d 128", "bb"),
        compiled_as(TWIN, "d 64", "aa"),
        compiled_as(TWIN, "d 128", "bb"),
    )
    (row,) = of(report, "triton-fwd")["builds"]
    assert row["same"] == [{"config": TWIN, "other": CONFIG, "builds": 2}]
    assert (row["builds"], row["compiled"]) == (2, 2)
    assert [(one["config"], one["builds"]) for one in row["instructions"]] == [(CONFIG, 2)]
    said = (
        f"`{TWIN}` compiles to the binary of `{CONFIG}` in all 2 builds compared: it is not"
        " counted as a config of its own."
    )
    assert said in as_markdown(report)
    assert "not counted as a config of its own" in as_html(report)
    again = parse(json.loads(dumps(report)))
    assert of(again, "triton-fwd")["builds"] == [row]


@pytest.mark.parametrize(
    "twin",
    [
        (compiled_as(TWIN, "d 64", "aa"), compiled_as(TWIN, "d 128", "cc")),  # one differs
        (compiled_as(TWIN, "d 64", "aa"), compiled_as(TWIN, "d 256", "bb")),  # one has no twin
        (compiled_as(TWIN, "d 64", ""),),  # its binary is not known
        (compiled_as(TWIN, "d 64", "aa", error="spills"),),  # it fails
        (compiled_as(TWIN, "d 64", "aa", resources=None, error="no such pass"),),
    ],
)
def test_any_difference_makes_a_config_of_its_own(twin: tuple[Built, ...]) -> None:
    report = made(compiled_as(CONFIG, "d 64", "aa"), compiled_as(CONFIG, "d 128", "bb"), *twin)
    (row,) = of(report, "triton-fwd")["builds"]
    assert row["same"] == []
    assert row["builds"] == 2 + len(twin)
    assert "config of its own" not in as_markdown(report)


def test_builds_that_were_left_out_compare_with_nothing() -> None:
    """A build that was listed and not compiled says nothing for its config, and nothing against."""
    left = compiled_as(TWIN, "d 128", "", resources=None, sass=None)
    report = made(compiled_as(CONFIG, "d 64", "aa"), compiled_as(TWIN, "d 64", "aa"), left)
    (row,) = of(report, "triton-fwd")["builds"]
    assert row["same"] == [{"config": TWIN, "other": CONFIG, "builds": 1}]
    assert "in the one build compared" in as_markdown(report)
    alone = made(compiled_as(CONFIG, "d 64", "aa"), left)
    assert of(alone, "triton-fwd")["builds"][0]["same"] == []
