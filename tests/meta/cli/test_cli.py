"""The command line: one-line usage errors, files that do not load, and its page in docs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.finished_runs import PLAIN, command
from verify import __version__, cli
from verify.campaign.runner import USAGE
from verify.cell.process import ROOT
from verify.cli import options, summary, tools
from verify.evidence import load
from verify.machine import device, settings
from verify.machine.starter import Program
from verify.variant.validation import INPUT_DTYPES

PAGE = ROOT / "docs" / "command-line.md"


# What is wrong, and what the one line must name.
BAD = [
    (("run", "--examples", "0"), ("--examples", "x>=1")),
    (("run", "--examples", "-5"), ("--examples", "x>=1")),
    (("run", "--seed", "-1"), ("--seed", "x>=0")),
    (("run", "-k", "(("), ("-k", "and, or, not")),
    (("run", "-k", "a b"), ("-k", "and, or, not")),
    (("run", "-n", "many"), ("--workers", "auto")),
    (("run", "-n", "-1"), ("--workers", "auto")),
    (("sanitize", "-n", "2.5"), ("--workers", "auto")),
    (("run", "--run-id", "../up"), ("--run-id", "letters")),
    (("run", "--profile", "fast"), ("--profile", "nightly")),
    (("run", "no_such_file.py"), ("no_such_file.py",)),
    (("run", "."), ("this folder holds no kernel files",)),
    (("list", str(ROOT / "kernels")), ("the collection: name a folder in it",)),
    (("probe", "no_such_file.py"), ("no_such_file.py",)),
    (("fuzz", "--max-time", "0"), ("--max-time", "above 0")),
    (("fuzz", "--max-time", "nan"), ("--max-time", "above 0")),
    (("fuzz", "--max-time", "soon"), ("--max-time", "float")),
    (("fuzz", "-x", "--keep-going"), ("--keep-going", "--exitfirst")),
    (("bench", "suite", "--seconds", "-2"), ("--seconds", "above 0")),
    (("bench", "kernels", "--seconds", "0"), ("--seconds", "above 0")),
    (("bench", "kernels", "--shapes", "1,2,3"), ("--shapes", "B,H,N,D")),
    (("bench", "kernels", "--suite", "slow"), ("--suite", "quick")),
    (("bench", "kernels", "--calls", "0"), ("--calls", "x>=1")),
    (("bench", "kernels", "--publish", "-k", "flash"), ("--publish", "-k")),
    (("bench", "kernels", "no_such_file.py"), ("no_such_file.py",)),
    (("replay", "nonsense"), ("nonsense", "variant:config:group:problem")),
    (("report", "--examples", "0"), ("--examples",)),
]


@pytest.mark.parametrize(("words", "named"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_usage_names_the_option_and_what_is_legal(
    words: tuple[str, ...],
    named: tuple[str, ...],
    at_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, *words) == USAGE
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert all(name in line for name in named), line
    assert not list(at_home.iterdir()), "a usage error leaves nothing behind"


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        ("VERIFY_DEADLINE", "soon", "above 0"),
        ("VERIFY_DEADLINE", "0", "above 0"),
        ("VERIFY_SEARCH_SECONDS", "-1", "at least 0"),
        ("VERIFY_SHRINK_SECONDS", "nan", "at least 0"),
        ("VERIFY_SHRINK_SECONDS", "", "at least 0"),
        ("VERIFY_CUDA_CACHE", __file__, "a directory"),
        ("VERIFY_BOOTSTRAP", "yes", "0 or 1"),
        ("VERIFY_COMPUTE_SANITIZER", __file__, "a program that can be run"),
    ],
)
def test_a_variable_that_makes_no_sense_is_a_usage_error(
    name: str,
    value: str,
    legal: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, value)
    assert command(monkeypatch, "run", PLAIN) == USAGE
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert line.startswith(f"verify: {name}=")
    assert legal in line


def test_what_needs_no_torch_imports_none() -> None:
    """Help of every command, version and usage errors answer at once."""
    script = (
        "import sys\nfrom verify.cli import app, main\nfor words in (['--help'], ['--version'],"
        " *([name, '--help'] for name in app.commands), ['run', '--examples', '0'], ['replay',"
        " 'x'], ['run', 'absent.py'], ['list', 'absent.py'], ['report', '--run', 'absent'],"
        " ['report', '--render', 'absent'], ['recheck', 'absent'], ['witness', 'absent'],"
        " ['compare', 'absent', 'absent']):\n    sys.argv = ['verify',"
        " *words]\n    main()\nheavy = {'torch', 'triton', 'numpy', 'matplotlib', 'hypothesis',"
        " 'pytest'} & set(sys.modules)\nsys.exit(', '.join(sorted(heavy)) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"verify, version {__version__}" in done.stdout
    assert "docs/command-line.md" in done.stdout


def test_names_that_match_nothing_are_answered_with_those_that_exist(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "run", "-n", "0", "-k", "nosuch", PLAIN) == USAGE
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert line.startswith("verify: -k: nothing matches 'nosuch'")
    assert "correct_plain.py@" in line
    assert "float32" in line


IMPORTS_NOTHING = "import torch\nimport no_such_module\n"
WHY = "does not load: ModuleNotFoundError: No module named 'no_such_module' (broken.py, line 2)"


def test_a_file_that_does_not_load_is_a_usage_error_whatever_is_selected(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (at_home / "broken.py").write_text(IMPORTS_NOTHING)
    assert command(monkeypatch, "run", "-n", "0", "-k", "nosuch", "broken.py") == USAGE
    assert capsys.readouterr().out.strip() == f"verify: broken.py {WHY}"
    assert not list(at_home.glob(".verify/report/*"))
    (run,) = at_home.glob(".verify/runs/*")
    assert not load(run).verdicts


def test_names_that_match_nothing_do_not_hide_a_file_that_does_not_load(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (at_home / "broken.py").write_text(IMPORTS_NOTHING)
    assert command(monkeypatch, "run", "-n", "0", "-k", "nosuch", "broken.py", PLAIN) == USAGE
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert line.startswith("verify: -k: nothing matches 'nosuch'")
    assert line.endswith(f"; broken.py {WHY}")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("def attention(q, k, v)\n    return q\n", "SyntaxError: expected ':' (broken.py, line 1)"),
        ("X = 1\n", "broken.py declares no VARIANT and has no function of (q, k, v)"),
        ("import os\nos._exit(7)\n", "crash: exited with status 7"),
    ],
)
def test_why_a_file_does_not_load_is_one_line(
    content: str,
    why: str,
    at_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (at_home / "broken.py").write_text(content)
    case = "broken.py@x:default:accuracy:sq=3,skv=3,d=32,dtype=float32"
    for words in (("list", "broken.py"), ("replay", case)):
        assert command(monkeypatch, *words) == USAGE
        (line,) = capsys.readouterr().out.strip().splitlines()
        assert line.startswith(f"verify: broken.py does not load: {why}")


# The page.


def test_the_page_tells_every_command_option_and_variable() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `verify (\w+)", page, re.MULTILINE)) == set(cli.app.commands)
    run = cli.app.commands["run"]
    assert all(
        f"`{parameter.opts[0]}" in page
        for parameter in run.params
        if parameter.opts[0].startswith("-")
    )
    for state in (
        summary.HOLDS,
        summary.WRONG,
        summary.KNOWN,
        summary.INCOMPLETE,
        summary.JUDGE_ERROR,
        summary.NOT_RUN,
    ):
        assert f"| {state} |" in page


def test_the_page_tells_the_environment_that_the_code_reads() -> None:
    files = [
        path
        for folder in ("verify", "references", "kernels", "tests")
        for path in (ROOT / folder).rglob("*.py")
    ]
    names = {
        name
        for path in [*files, ROOT / "conftest.py"]
        for name in re.findall(r"\bVERIFY_[A-Z_]+\b", path.read_text())
    }
    known = {setting.name for setting in settings.SETTINGS}
    assert names == known | set(settings.INTERNAL)
    assert "(reference/environment.md)" in PAGE.read_text(encoding="utf-8")
    page = PAGE.parent / "reference" / "environment.md"
    table, _, internal = page.read_text(encoding="utf-8").partition("not for users:")
    assert set(re.findall(r"^\| `(VERIFY_\w+)`", table, re.MULTILINE)) == known
    assert set(re.findall(r"VERIFY_\w+", internal)) == set(settings.INTERNAL)
    help_text = cli.app.help or ""
    assert known <= set(re.findall(r"VERIFY_\w+", help_text))
    assert not [line for line in help_text.splitlines() if line.startswith(" ")], "shown as it is"


def test_the_dtypes_that_an_option_offers_are_those_of_a_declaration() -> None:
    assert options.INPUT_DTYPES == INPUT_DTYPES


@pytest.mark.parametrize(("gpus", "workers"), [([], "3"), (["GPU-0"], "auto")])
def test_the_suite_has_a_worker_more_than_cores(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], workers: str
) -> None:
    """On a GPU their memory decides; the user's own number comes last and counts."""
    asked: list[Sequence[str]] = []

    def launch(name: str, program: Program) -> Any:
        asked.append(program.arguments)
        return SimpleNamespace(wait=lambda: 5)

    monkeypatch.setattr(tools, "launch", launch)
    monkeypatch.setattr(device, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(device, "cores", lambda: 2)
    monkeypatch.setattr(sys, "argv", ["verify", "test", "-n", "1", "-x"])
    assert cli.main() == 5
    assert asked == [["-n", workers, "--dist", "worksteal", "-n", "1", "-x"]]
