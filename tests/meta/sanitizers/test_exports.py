"""The account of a run as SARIF 2.1.0 and JUnit XML: one result, and one test case, per failure."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from verify.sanitizers import page
from verify.sanitizers.account import Account, Failed
from verify.sanitizers.exports import junit, sarif

CASE = "kernel:default:sanitizer:sq=1,skv=1,d=8,dtype=float16"


def failed(tool: str, **more: Any) -> Failed:
    failure = {
        "variant": "kernel",
        "config": "default",
        "dtype": "float16",
        "case": CASE,
        "tool": tool,
        "outcome": "faulty",
        "message": "Precise: Invalid __global__ write \x07",
        "frame": "family.py:3 in forward",
        "replay": f"python -m verify sanitize --case '{CASE}' --tool {tool}",
        "record": {
            "tool": tool,
            "kind": "Precise",
            "level": "Error",
            "kernel": "flash",
            "source": "kernels/cuda/ptx.cuh:34",
            "thread": "(1, 0, 0)",
            "nearest": "1 bytes after the nearest allocation at 0x7f00 of size 16 bytes",
        },
    }
    return {**failure, **more}  # type: ignore[typeddict-item, return-value]


@pytest.fixture
def account() -> Account:
    race = {"tool": "racecheck", "kind": "Analysis", "level": "Warning", "source": "/x/a.cu:7"}
    failures = [
        failed("memcheck"),
        failed("memcheck", message="another record"),
        failed("racecheck", record=race),
        failed("synccheck", outcome="inconclusive", record=None),
        failed("", outcome="failed", record=None),
    ]
    return {
        "schema": 1,
        "run": "r",
        "device": {"slug": "d", "name": "D", "capability": "9.0"},
        "sanitizer": "2025.3.1.0",
        "tools": ["memcheck", "racecheck"],
        "whole": True,
        "seconds": 2.0,
        "planted": [
            {
                "variant": "planted-overrun",
                "about": "writes",
                "tool": tool,
                "wanted": wanted,
                "outcome": "clean",
                "holds": wanted == "any",
                "reasons": [],
                "record": None,
                "seconds": 1.0,
                "blind": "" if wanted == "caught" else "looks elsewhere",
            }
            for tool, wanted in (("memcheck", "caught"), ("racecheck", "any"))
        ],
        "tried": [
            {
                "variant": "kernel",
                "family": "cute",
                "source_hash": "0",
                "config": "default",
                "dtype": "float16",
                "tool": "initcheck",
                "outcome": "clean",
                "cases": {CASE: "clean"},
                "processes": [],
            }
        ],
        "failures": failures,
        "not_run": [{"variant": "other", "reason": "not asked for"}],
        "waivers": [],
    }


def test_sarif_has_what_version_2_1_0_requires(account: Account) -> None:
    log = sarif(account)
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "compute-sanitizer"
    rules = [rule["id"] for rule in driver["rules"]]
    assert len(set(rules)) == len(rules) == 4
    (invocation,) = run["invocations"]
    assert invocation["executionSuccessful"] is False  # memcheck missed its planted fault
    assert len(run["results"]) == len(account["failures"])
    for result, failure in zip(run["results"], account["failures"], strict=True):
        assert rules[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in {"none", "note", "warning", "error"}
        assert failure["message"] in result["message"]["text"]
        assert failure["replay"] == result["properties"]["replay"]
        for location in result.get("locations", ()):
            assert location["physicalLocation"]["region"]["startLine"] >= 1
    ours, _, elsewhere, *others = run["results"]
    place = ours["locations"][0]
    uri = {"uri": "kernels/cuda/ptx.cuh", "uriBaseId": "%SRCROOT%"}
    assert place["physicalLocation"]["artifactLocation"] == uri
    assert place["logicalLocations"] == [{"name": "flash", "kind": "function"}]
    assert elsewhere["level"] == "warning"
    place = elsewhere["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": "/x/a.cu"}, "region": {"startLine": 7}}
    assert all("locations" not in result for result in others)


def test_junit_has_a_test_case_for_each_failure(account: Account) -> None:
    suite = ElementTree.fromstring(junit(account))
    cases = suite.findall("testcase")
    assert suite.attrib["tests"] == str(len(cases)) == "9"
    assert suite.attrib["failures"] == str(len(suite.findall("testcase/failure"))) == "6"
    assert suite.attrib["skipped"] == str(len(suite.findall("testcase/skipped"))) == "1"
    first = suite.findall("testcase/failure")[1]
    assert first.attrib["message"] == "Precise: Invalid __global__ write ?"
    assert first.text is not None
    for line in ("thread: (1, 0, 0)", "launched at: family.py:3 in forward", "replay: python -m"):
        assert line in first.text


def test_the_page_tells_each_failure_and_what_is_not_seen_by_design(account: Account) -> None:
    text = page.markdown(account)
    for words in ("nearest allocation at 0x7f00", "launched at family.py:3", "looks elsewhere"):
        assert words in text
    assert text.count("--tool memcheck") == 2
