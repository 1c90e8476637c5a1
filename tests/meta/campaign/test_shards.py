"""Shards of a campaign: disjoint, as large as each other, and together the whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.commands import verify
from tests.harness.leased_campaigns import PLAIN, results
from verify.campaign import chosen
from verify.evidence import load


@pytest.mark.for_ci
@given(st.sets(st.text(max_size=3), max_size=40), st.integers(1, 12))
def test_shards_are_a_partition(names: set[str], count: int) -> None:
    shards = [chosen.in_shard(names, number, count) for number in range(1, count + 1)]
    assert sorted(name for shard in shards for name in shard) == sorted(names)
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


def _collected(shard: str | None, dtypes: list[str]) -> list[str]:
    """What is left of a collection of ten tests."""
    targets = [
        SimpleNamespace(dtype=("float16", "float32")[n % 2], group="accuracy") for n in range(10)
    ]
    items: list[Any] = [
        SimpleNamespace(nodeid=f"t{n}", callspec=SimpleNamespace(params={"target": target}))
        for n, target in enumerate(targets)
    ]
    given_options = {"--only-dtype": dtypes, "--only-oracle": [], "--shard": shard}
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    config: Any = SimpleNamespace(getoption=given_options.__getitem__, hook=hook)
    chosen.pytest_collection_modifyitems(config, items)
    return [item.nodeid for item in items]


def test_a_shard_is_one_of_what_is_chosen() -> None:
    whole = _collected(None, ["float32"])
    assert whole == ["t1", "t3", "t5", "t7", "t9"]
    shards = [_collected(f"{number}/2", ["float32"]) for number in (1, 2)]
    assert shards == [["t1", "t5", "t9"], ["t3", "t7"]]
    assert len(_collected("3/3", [])) == 3


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/", "/2", "1/0", "a/b", "1/2/3", "-1/2"])
def test_what_is_no_shard_is_refused(text: str, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from verify.cli import app

    done = CliRunner().invoke(app, ["run", str(PLAIN), "--shard", text])
    assert done.exit_code == 2
    assert "--shard" in done.output


@pytest.mark.thorough
def test_reports_of_shards_are_the_whole_runs(tmp_path: Path) -> None:
    words = ["run", PLAIN, "--dtype", "float32", "--examples", 3, "--seed", 4, "-n", 0]
    for name, more in (("whole", []), ("a", ["--shard", "1/2"]), ("b", ["--shard", "2/2"])):
        done = verify(*words, *more, "--run-id", name, cwd=tmp_path)
        assert done.returncode == 0, done.stdout
    runs = tmp_path / ".verify" / "runs"
    merged = load(runs / "a", runs / "b")
    whole = load(runs / "whole")
    assert results(merged) == results(whole)
    assert merged.drawn == whole.drawn
    done = verify("report", "--run", "a", "--run", "b", cwd=tmp_path)
    assert f"{len({v.case for v in whole.verdicts})} cases, 0 failing" in done.stdout
    done = verify(*words, "--shard", "90/90", "--run-id", "none", cwd=tmp_path)
    assert done.returncode == 2
    assert "--dtype, --shard: nothing matches 'float32' with '90/90'" in done.stdout
