"""What `verify run` judges by options and pyproject.toml: dtypes, oracles, defaults; progress."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from tests.harness.finished_runs import PLAIN, command
from verify import oracles
from verify.campaign import progress
from verify.campaign.progress import Counted, Progress, duration
from verify.campaign.runner import CLEAN, USAGE
from verify.cli.options import INPUT_DTYPES
from verify.evidence import load
from verify.machine.defaults import Defaults, DefaultsError, defaults
from verify.variant import validation

KERNEL = """
import torch
DTYPES = ("float32", "bfloat16")
HEAD_DIMS = (32,)
def attention(q, k, v):
    return torch.softmax((q @ k.mT) * q.shape[-1] ** -0.5, dim=-1) @ v
"""
ALWAYS = {"execution", "memory"}  # of every launch, whatever is asked


@pytest.mark.for_ci
def test_chosen_dtypes_and_oracles_are_judged_alone(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (at_home / "mine.py").write_text(KERNEL, encoding="utf-8")
    (at_home / "pyproject.toml").write_text(
        '[tool.verify]\nexamples = 1\nkernels = ["mine.py"]\nworkers = 0\n', encoding="utf-8"
    )
    words = ("--dtype", "float32", "--oracle", "counting", "--oracle", "gather")
    assert command(monkeypatch, "run", *words) == CLEAN
    (run,) = at_home.glob(".verify/runs/*")
    verdicts = load(run).verdicts
    assert {verdict.dtype for verdict in verdicts} == {"float32"}
    assert {verdict.oracle for verdict in verdicts} - ALWAYS == {"counting", "gather"}
    counted = [v.group for v in verdicts if v.oracle == "counting"]
    assert counted.count("counting") == 1, "one example"
    tests = progress.recorded(run)
    assert tests is not None
    assert tests.done == tests.total == 4


def test_unknown_names_and_dtypes_are_answered_with_the_legal_ones(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, told in (
        (("--oracle", "./bond.py"), "--oracle: './bond.py' is no file, and no name of `verify"),
        (("--dtype", "float64"), "'float64' is not one of 'float16', 'bfloat16', 'float32'"),
        (("--max-time", "0"), "--max-time: 0 is not a number of seconds above 0"),
    ):
        assert command(monkeypatch, "run", *words, PLAIN) == USAGE
        (line,) = capsys.readouterr().out.strip().splitlines()
        assert told in line


def test_an_unknown_oracle_is_answered_with_all() -> None:
    with pytest.raises(ValueError, match="'bond' is no file, and none of bound, causality, "):
        oracles.use_only(["bound", "bond"])
    assert len(oracles.oracles()) > 2, "nothing has changed"
    oracles.use_only(["bound"])
    try:
        assert {oracle.name for oracle in oracles.oracles()} == {"bound"}
        assert oracles.of_group("counting") == ()
        assert oracles.leading_oracle("counting") == ""
        assert {name for each in oracles.by_module().values() for name in each} == set(
            oracles.oracles()
        )
    finally:
        oracles.use_only([])
    assert oracles.of_group("counting")


@pytest.mark.thorough
def test_an_unknown_oracle_ends_a_run(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "run", "--oracle", "bond", "-n", "0", PLAIN) == USAGE
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert line.startswith("verify: --oracle: 'bond' is no file, and none of bound, causality, ")


@pytest.mark.thorough
def test_a_dtype_that_no_variant_has_is_answered_with_those_that_it_has(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "run", "--dtype", "float8_e5m2", "-n", "0", PLAIN) == USAGE
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert line.startswith("verify: --dtype: nothing matches 'float8_e5m2'; ids are made of")
    assert "bfloat16, float16, float32" in line


def test_the_options_know_every_dtype() -> None:
    assert INPUT_DTYPES == validation.INPUT_DTYPES


def test_the_table_of_a_project_is_found_from_below(tmp_path: Path) -> None:
    assert defaults(tmp_path) == Defaults()
    (tmp_path / "pyproject.toml").write_text(
        "[tool.verify]\nexamples = 7\ntime = 90\nprofile = 'ci'\nseed = 0\nworkers = 'auto'\n"
        "strict = true\nkernels = ['kernels/one.py']\n",
        encoding="utf-8",
    )
    below = tmp_path / "kernels"
    below.mkdir()
    found = defaults(below)
    assert found == Defaults(
        examples=7,
        time=90.0,
        profile="ci",
        seed=0,
        workers="auto",
        strict=True,
        kernels=(Path("one.py"),),
    )
    (below / "pyproject.toml").write_text("[tool.other]\nkey = 1\n", encoding="utf-8")
    assert defaults(below) == Defaults(), "the nearest file holds"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("example = 1", "tool.verify.example: no such key; there are examples, time, profile"),
        ("examples = 0", "tool.verify.examples: 0 is no whole number from 1"),
        ("examples = true", "tool.verify.examples: True is no whole number from 1"),
        ("time = inf", "tool.verify.time: inf is no number of seconds above 0"),
        ("profile = 'fast'", "tool.verify.profile: 'fast' is no name out of dev, ci, gpu"),
        ("seed = -1", "tool.verify.seed: -1 is no whole number from 0"),
        ("workers = 'many'", "tool.verify.workers: 'many' is no \"auto\" or whole number from 0"),
        ("strict = 1", "tool.verify.strict: 1 is no true or false"),
        ("kernels = 'one.py'", "tool.verify.kernels: 'one.py' is no list of paths"),
        ("examples =", "pyproject.toml: Invalid value"),
    ],
)
def test_a_table_that_makes_no_sense_is_one_line(
    text: str,
    words: str,
    at_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (at_home / "pyproject.toml").write_text(f"[tool.verify]\n{text}\n", encoding="utf-8")
    with pytest.raises(DefaultsError, match=re.escape(words)):
        defaults()
    assert command(monkeypatch, "run", PLAIN) == USAGE
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert line.startswith("verify: pyproject.toml: ")
    assert words in line


def test_progress_tells_the_total_and_the_time_left(tmp_path: Path) -> None:
    shown = Progress(tmp_path, began=time.monotonic() - 60)
    assert shown.text() == "starting"
    progress.record(tmp_path, Counted(0, 8))
    assert shown.text() == "0 of 8 tests, 0 cases, 0 failing verdicts"
    lines = '{"kind":"begin"}\n{"kind":"begin"}\n{"outcome":"fail"}\n{"kind":"begin"'
    (tmp_path / "gw0.jsonl").write_text(lines, encoding="utf-8")
    progress.record(tmp_path, Counted(2, 8))
    assert shown.text() == "2 of 8 tests, 2 cases, 1 failing verdicts; about 3 min left"
    shown.deadline = time.monotonic() + 20.5
    assert re.search(r"; about 2[01] s left", shown.text())
    assert (duration(119), duration(150)) == ("119 s", "2 min")


def test_without_a_terminal_progress_is_plain_lines_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress.record(tmp_path, Counted(1, 8))
    monkeypatch.setattr(progress, "_FIRST", 0.0)
    for quiet, count in ((True, 0), (False, 1)):
        with progress.shown(Console(width=20), quiet) as display:
            display.show(Progress(tmp_path))
            display.show(Progress(tmp_path))  # half a minute too early
        lines = capsys.readouterr()
        assert lines.out == ""
        assert len(lines.err.splitlines()) == count
        assert "\x1b" not in lines.err
    assert lines.err == "verify: 0 s: 1 of 8 tests, 0 cases, 0 failing verdicts\n"


def test_on_a_terminal_progress_is_one_line_that_changes(tmp_path: Path) -> None:
    progress.record(tmp_path, Counted(3, 8))
    console = Console(force_terminal=True, width=100, record=True)
    with progress.shown(console, quiet=False) as display:
        display.show(Progress(tmp_path))
        console.print(display.bar)  # type: ignore[union-attr]
    assert "3 of 8 tests, 0 cases, 0 failing verdicts" in console.export_text()
