"""Counts of planted faults, in one run and over several."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from verify.campaign.runner import CLEAN, USAGE
from verify.cli.sanitizer_pages import render_again
from verify.document import markdown
from verify.sanitizers import counts, exports, page
from verify.sanitizers.account import Account, Planted

MISSED = "planted-missing-barrier"
BASE = {
    "schema": 1,
    "sanitizer": "2025.3.1.0",
    "tools": ["memcheck", "racecheck"],
    "whole": False,
    "seconds": 1.0,
    "tried": [],
    "not_run": [],
    "waivers": [],
}


def planted(variant: str, tool: str, wanted: str, outcome: str, *, holds: bool) -> Planted:
    return {
        "variant": variant,
        "about": "",
        "tool": tool,
        "wanted": wanted,
        "outcome": outcome,
        "holds": holds,
        "reasons": [],
        "record": None,
        "seconds": 1.0,
    }


def account(run: str, **changed: Any) -> Account:
    tries = [
        planted("planted-overrun", "memcheck", "caught", "faulty", holds=True),
        planted("planted-overrun", "memcheck", "caught", "faulty", holds=True),
        planted("planted-overrun", "racecheck", "any", "clean", holds=True),
        planted("planted-correct", "racecheck", "clean", "clean", holds=True),
        planted(MISSED, "racecheck", "caught", "faulty", holds=True),
        planted(MISSED, "racecheck", "caught", "clean", holds=False),
        planted(MISSED, "racecheck", "caught", "not run", holds=False),
    ]
    given = {**BASE, "run": run, "planted": tries, "device": {"name": "H100"}}
    return cast(Account, given | changed)


def numbers(found: list[counts.Count]) -> dict[tuple[str, str], tuple[int, int, list[str]]]:
    return {(c["variant"], c["tool"]): (int(c["held"]), int(c["tried"]), c["runs"]) for c in found}


def test_only_what_is_required_and_was_run_counts() -> None:
    assert numbers(counts.added(account("a"), [])) == {
        ("planted-overrun", "memcheck"): (2, 2, ["a"]),
        ("planted-correct", "racecheck"): (1, 1, ["a"]),
        (MISSED, "racecheck"): (1, 2, ["a"]),
    }


def test_runs_add_up_and_none_is_counted_twice() -> None:
    two = account("b", counts=counts.added(account("b"), [account("a")]))
    whole = counts.added(account("c"), [two])
    assert numbers(whole)["planted-overrun", "memcheck"] == (6, 6, ["c", "b", "a"])
    assert numbers(whole)[MISSED, "racecheck"][:2] == (3, 6)
    for again in ("a", "b"):
        with pytest.raises(ValueError, match=f"^{again} is counted by"):
            counts.added(account("c"), [two, account(again)])


def test_another_device_does_not_add_up() -> None:
    with pytest.raises(ValueError, match="a is of device L4"):
        counts.added(account("b"), [account("a", device={"name": "L4"})])


def test_other_versions_of_a_tool_are_counted_apart_and_shown() -> None:
    newer = account("newer", sanitizer="2026.4.0.0")
    fpsan = planted("planted-algebra-wrong-scale", "fpsan", "caught", "faulty", holds=True)
    of_triton = account(
        "triton",
        sanitizer="not used",
        tools=["fpsan"],
        planted=[{**fpsan, "tries": 10, "held": 10}],
        device={"name": "H100", "triton": "3.8.0"},
    )
    again = account("again", device={"name": "H100", "triton": "3.8.0"})
    told = counts.together(account("now"), [newer, of_triton, again])
    found = {
        (c["variant"], c["tool"], c.get("by")): (int(c["held"]), int(c["tried"]))
        for c in told.get("counts", [])
    }
    assert found["planted-overrun", "memcheck", "compute-sanitizer 2025.3.1.0"] == (4, 4)
    assert found["planted-overrun", "memcheck", "compute-sanitizer 2026.4.0.0"] == (2, 2)
    assert found["planted-algebra-wrong-scale", "fpsan", "Triton 3.8.0"] == (10, 10)
    # A run of the same tools adds its counts alone, whatever Triton was there.
    assert [one["run"] for one in told.get("further", [])] == ["newer", "triton"]
    text = markdown.render(page.document(told), "sanitizer.json")
    assert "compute-sanitizer 2026.4.0.0: memcheck, racecheck" in text
    assert "Triton 3.8.0: fpsan" in text
    assert "caught in 10 of 10" in text
    (main, *others) = exports.sarif(told)["runs"]
    assert main["tool"]["driver"]["version"] == "2025.3.1.0"
    assert [run["tool"]["driver"]["name"] for run in others] == ["compute-sanitizer", "Triton"]
    # Added once more, it brings what it has with it.
    later = counts.together(account("later"), [told])
    assert [one["run"] for one in later.get("further", [])] == ["newer", "triton"]


def test_a_copy_names_the_version_of_a_tool_where_it_is_another_one() -> None:
    def run(name: str, **changed: Any) -> Account:
        found = [
            {**planted("planted-copy", tool, "caught", "faulty", holds=True), "copy_of": "shipped"}
            for tool in ("racecheck", "skew")
        ]
        caught = [{**one, "record": {"kind": "hazard"}} for one in found]
        return account(name, planted=caught, **changed)

    newer = run("newer", sanitizer="2026.4.0.0")
    told = run("now", further=[run("same"), newer])
    (table,) = page.copies(told)
    said = str(table)
    assert "'racecheck, 2 runs, skew, 3 runs, racecheck of compute-sanitizer 2026.4.0.0'" in said


def test_a_run_of_the_same_tools_is_shown_if_it_tried_another_kernel() -> None:
    tried = {"variant": "shipped", "family": "ptx", "source_hash": "a", "config": "c"}
    tried |= {"dtype": "float16", "tool": "racecheck", "outcome": "clean", "cases": {}}
    tried |= {"processes": []}
    first, cut = account("first", tried=[tried]), {**tried, "outcome": "not run"}
    for now, shown in (([], ["first"]), ([cut], ["first"]), ([tried], [])):
        told = counts.together(account("now", tried=now), [first])
        assert [one["run"] for one in told.get("further", [])] == shown


def test_a_copy_that_a_run_with_another_tool_caught_says_so() -> None:
    copy = planted("copy", "consan", "any", "faulty", holds=True)
    copy |= {"copy_of": "shipped", "spare": True, "record": {"text": "a race"}}
    other = account(
        "other", tools=["consan"], planted=[copy], device={"name": "H100", "triton": "3.8.0"}
    )
    told = counts.together(account("now"), [other])
    text = markdown.render(page.document(told), "sanitizer.json")
    assert re.search(r"\*\*copy\*\* \|.*\| consan of Triton 3.8.0 \|", text)


def test_an_account_is_rendered_again_with_what_others_add(tmp_path: Path) -> None:
    for run in ("a", "b"):
        (tmp_path / f"{run}.json").write_text(json.dumps(account(run)))
    files = tmp_path / "a.json", (tmp_path / "b.json",)
    assert render_again(*files, tmp_path / "out", Console(file=io.StringIO())) == CLEAN
    (read,) = counts.read([tmp_path / "out" / "sanitizer.json"])
    assert numbers(read.get("counts", []))["planted-overrun", "memcheck"][:2] == (4, 4)
    assert "caught 4 of 4" in (tmp_path / "out" / "sanitizer.md").read_text()
    twice = tmp_path / "a.json", (tmp_path / "a.json",)
    assert render_again(*twice, tmp_path / "out", Console(file=io.StringIO())) == USAGE


def test_the_page_tells_what_was_tried_more_than_once() -> None:
    told = account("b", counts=counts.added(account("b"), [account("a")]))
    text = markdown.render(page.document(told), "sanitizer.json")
    assert "caught 4 of 4" in text
    assert "clean 2 of 2" in text
    assert "caught 2 of 4" in text
    once = [planted("planted-overrun", "memcheck", "caught", "faulty", holds=True)]
    alone = account("a", planted=once)
    assert page.over_runs({**alone, "counts": counts.added(alone, [])}) == ()


def test_an_earlier_run_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "sanitizer.json"
    path.write_text(json.dumps(account("a")))
    (read,) = counts.read([path])
    assert read["run"] == "a"
    path.write_text("{}")
    with pytest.raises(ValueError, match="is no account of a run"):
        counts.read([path])
