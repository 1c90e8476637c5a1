"""Counts of planted faults, in one run and over several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from verify.document import markdown
from verify.sanitizers import counts, page
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


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"device": {"name": "L4"}}, "device"),
        ({"device": {"name": "H100", "triton": "3.8.0"}}, "Triton"),
        ({"sanitizer": "2026.4.0.0"}, "compute-sanitizer"),
    ],
)
def test_other_tools_do_not_add_up(changed: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=f"a is of {what}"):
        counts.added(account("b"), [account("a", **changed)])


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
