"""Which configs count as judged: passing verdicts of the same source on the same device, and no
failing one that is news."""

from __future__ import annotations

import dataclasses
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tests.harness.fake_campaign import BINS, DEVICE, built, entry, evidence, failing, verdict
from tests.harness.kernel_files import Writer
from verify.campaign.judged import Judged, judged, of_evidence, of_report
from verify.cell.discovery import roster
from verify.evidence import Evidence, Recorder
from verify.evidence.known_failures import Xfail, Xfails
from verify.problem import Problem
from verify.report import build, write
from verify.variant import Config, Declaration

PROBLEM = Problem(seqlen_q=3, seqlen_kv=3, head_dim=16, dtype="float16")
CONFIG = "m128n64w4s3"
KEY = ("triton-fwd", CONFIG, "float16")
SOURCE = {"triton-fwd": entry("triton-fwd").source_hash}


def of(*verdicts: Any, **changes: Any) -> Evidence:
    found = evidence(6)
    return dataclasses.replace(found, **({"verdicts": verdicts} | changes))


def test_a_passing_verdict_of_the_same_source() -> None:
    found = of_evidence(of(verdict("triton-fwd", "float16", 1)), SOURCE, Xfails())
    assert found == Judged(frozenset({KEY}), {})
    other = of_evidence(of(verdict("triton-fwd", "float16", 1)), {"triton-fwd": "9"}, Xfails())
    assert other == Judged(frozenset(), {})


def test_an_inapplicable_oracle_is_no_pass() -> None:
    none = verdict("triton-fwd", "float16", 1, outcome="inapplicable")
    assert of_evidence(of(none), SOURCE, Xfails()) == Judged(frozenset(), {})


def test_a_source_that_changed_during_the_runs_says_nothing() -> None:
    mixed = of(verdict("triton-fwd", "float16", 1), changed=("triton-fwd",))
    assert of_evidence(mixed, SOURCE, Xfails()) == Judged(frozenset(), {})


def test_a_failure_convicts_its_config_alone_unless_it_is_known() -> None:
    bad = failing("triton-fwd", "float16", 2, PROBLEM)  # of config m64n64w4s2
    both = of(verdict("triton-fwd", "float16", 1), bad)
    found = of_evidence(both, SOURCE, Xfails())
    assert found == Judged(frozenset({KEY}), {("triton-fwd", "m64n64w4s2", "float16"): bad.case})
    mixed = of(verdict("triton-fwd", "float16", 1, config="m64n64w4s2"), bad)
    assert not of_evidence(mixed, SOURCE, Xfails()).passing
    known = Xfail(cases=re.escape(bad.case), link="x", expires=date(2099, 1, 1), witness=bad.case)
    excused = of_evidence(mixed, SOURCE, Xfails((known,)))
    assert excused == Judged(frozenset({("triton-fwd", "m64n64w4s2", "float16")}), {})


TWIN = f"{CONFIG}-warp_specialize_1"
SAME_BINARY = tuple(
    built("triton-fwd", arch, f"{config}, d 64", code=code)
    for arch, config, code in (
        ("sm_90a", CONFIG, "aa"),
        ("sm_90a", TWIN, "aa"),
        ("sm_100a", CONFIG, "bb"),
        ("sm_100a", TWIN, "cc"),
    )
)


@pytest.mark.parametrize(
    ("capability", "same"),
    [("9.0", {("triton-fwd", TWIN): f"sm_90a gets the binary of {CONFIG}"}), ("10.0", {})],
)
def test_a_config_with_the_binaries_of_another_is_not_timed(capability, same) -> None:
    """Where it gets them: evidence and report say the same, of the device's architecture alone."""
    passing = [verdict("triton-fwd", "float16", 1, config=config) for config in (CONFIG, TWIN)]
    found = of(*passing, builds=SAME_BINARY)
    run = dataclasses.replace(found.run, device=found.run.device | {"capability": capability})
    found = dataclasses.replace(found, runs=(run,))
    (declaration,) = (e for e in found.variants if e.ref == "triton-fwd")
    of_run = of_evidence(found, SOURCE, Xfails())
    assert of_run.same == same
    assert of_report(build(found, BINS), SOURCE).same == same
    assert of_evidence(found, {"triton-fwd": "9"}, Xfails()).same == {}
    refusal = of_run.refusal(declaration, Config.parse(TWIN), "float16")
    said = f"no config of its own: sm_90a gets the binary of {CONFIG}"
    assert refusal == (said if same else None)
    assert of_run.refusal(declaration, Config.parse(CONFIG), "float16") is None


def test_a_report_says_the_same_of_complete_dtypes() -> None:
    ok = entry("torch-flash")
    report = build(evidence(24), BINS)
    (variant,) = (v for v in report["variants"] if v["ref"] == "torch-flash")
    found = of_report(report, {"torch-flash": ok.source_hash})
    assert found.failing == {}
    assert found.passing == {
        ("torch-flash", config, dtype) for config in ok.configs for dtype in ("float16", "bfloat16")
    }
    variant["dtypes"][0]["bins_missing"] = ["gqa"]
    fewer = of_report(report, {"torch-flash": ok.source_hash})
    assert {key[2] for key in fewer.passing} == {variant["dtypes"][1]["dtype"]}
    assert of_report(report, {"torch-flash": "another"}) == Judged(frozenset(), {})
    wrong = of_report(report, {"triton-tutorial": entry("triton-tutorial").source_hash})
    assert set(wrong.failing) == {
        ("triton-tutorial", "m64n64w4s2", dtype) for dtype in ("float16", "bfloat16")
    }


@pytest.fixture
def declaration(write: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Declaration:
    monkeypatch.chdir(tmp_path)
    (found,) = roster([write()]).declarations
    return found


def recorded(declaration: Declaration, name: str, slug: str, **changes: Any) -> None:
    known = entry(
        declaration.ref, ("float32",), source_hash=declaration.source_hash, configs=("default",)
    )
    made = verdict(declaration.ref, "float32", 1, config="default", **changes)
    run = dataclasses.replace(evidence(6).run, device=DEVICE | {"slug": slug})
    with Recorder(Path(".verify/runs") / name, "main") as recorder:
        for record in (run, known, made):
            recorder.write(record)


def test_runs_of_this_device_decide(declaration: Declaration) -> None:
    here, config = {**DEVICE, "slug": "here"}, Config()

    def refusal() -> str | None:
        return judged([declaration], here).refusal(declaration, config, "float32")

    assert refusal() == "not judged: no passing verdict of this source"
    recorded(declaration, "elsewhere", "there")
    assert refusal() is not None
    recorded(declaration, "passed", "here")
    assert refusal() is None
    assert judged([declaration], here).refusal(declaration, config, "float16") is not None
    recorded(declaration, "failed", "here", outcome="fail", case="a:b:c:d")
    assert refusal() == "fails: a:b:c:d"


def test_the_report_decides_where_no_run_does(declaration: Declaration) -> None:
    found = evidence(24)
    known = entry(
        declaration.ref, ("float32",), source_hash=declaration.source_hash, configs=("default",)
    )
    verdicts = tuple(
        verdict(declaration.ref, "float32", n, config="default", bins=("gqa",)) for n in range(3)
    )
    whole = dataclasses.replace(
        found, variants=(known,), verdicts=verdicts, lost=(), not_run=(), builds=()
    )
    write(build(whole, ("gqa",)), Path(".verify/report") / DEVICE["slug"])
    assert judged([declaration], DEVICE).refusal(declaration, Config(), "float32") is None
    recorded(declaration, "failed", DEVICE["slug"], outcome="fail", case="a:b:c:d")
    found_now = judged([declaration], DEVICE).refusal(declaration, Config(), "float32")
    assert found_now == "fails: a:b:c:d"
