"""The command line: one-line usage errors, states, interruption, exit codes, and its page in
docs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.fake_campaign import evidence, verdict
from verify import __version__, cli
from verify.campaign import runner
from verify.campaign.runner import CLEAN, FAILED, INFRASTRUCTURE, USAGE, RunRequest
from verify.cell.process import ROOT
from verify.cli import summary
from verify.evidence import Evidence, Recorder, errors, load
from verify.machine import settings, starter
from verify.machine.starter import Program
from verify.report import Report, build

SAMPLES = ROOT / "tests" / "sample_kernels"
PLAIN = str(SAMPLES / "correct_plain.py")
PAGE = ROOT / "docs" / "command-line.md"


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh current directory, from which commands find the sources."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    return tmp_path


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["verify", *words])
    return cli.main()


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
    """Help, version and usage errors answer at once."""
    script = (
        "import sys\nfrom verify.cli import main\nfor words in (['--help'], ['run', '--help'],"
        " ['--version'], ['run', '--examples', '0'], ['replay', 'x']):\n    sys.argv = ['verify',"
        " *words]\n    main()\nheavy = {'torch', 'triton', 'numpy', 'matplotlib', 'hypothesis',"
        " 'pytest'} & set(sys.modules)\nsys.exit(', '.join(sorted(heavy)) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"verify, version {__version__}" in done.stdout
    assert "docs/command-line.md" in done.stdout


# A campaign that ended: what is shown, and the exit code.


def recorded(run_id: str, data: Evidence) -> RunRequest:
    order = RunRequest(run_id=run_id)
    with Recorder(order.directory, "gw0") as recorder:
        for record in (*data.runs, *data.variants, *data.verdicts, *data.not_run, *data.drawn):
            recorder.write(record)
    return order


def states(output: str) -> dict[str, str]:
    """The last column of the table, by variant (without dtypes)."""
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in output.splitlines()
        if line.startswith("│")
    ]
    return {row[0]: row[-1] for row in rows}


def test_an_error_of_the_judge_is_named_beside_a_conviction(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = evidence(cases=6)
    erring, convicted = data.variants[0].ref, data.variants[1].ref
    verdicts = [v for v in data.verdicts if v.variant not in (erring, convicted)]
    verdicts.append(verdict(convicted, "float16", 0))
    order = recorded(
        "mixed", Evidence(runs=data.runs, variants=data.variants, verdicts=tuple(verdicts))
    )
    errors.record(
        order.directory,
        errors.JudgeError(erring, "test_x[it]", "ZeroDivisionError: the judge's own"),
    )
    monkeypatch.setattr(summary, "report_of", lambda folder, run_id: None)
    assert summary.finish(order, FAILED) == FAILED
    output = capsys.readouterr().out
    assert states(output)[erring] == summary.JUDGE_ERROR
    assert f"judge error: {erring}: ZeroDivisionError: the judge's own" in output
    assert {entry.ref for entry in data.variants} <= set(states(output)), (
        "every variant on trial is named"
    )


def test_what_is_incomplete_does_not_hold(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = passing()
    order = recorded("short", data)

    def report(missing: tuple[str, ...]) -> Report:
        return build(
            data, bins_required=lambda variant, dtype: missing if dtype == "bfloat16" else ()
        )

    monkeypatch.setattr(summary, "report_of", lambda folder, run_id: report(("no such bin",)))
    assert summary.finish(order, CLEAN) == INFRASTRUCTURE
    output = capsys.readouterr().out
    assert f"incomplete: {data.variants[0].ref} (bfloat16): 1 of 1 coverage bins empty" in output
    assert output.count("holds") == 1
    assert summary.finish(order, CLEAN, complete=False) == CLEAN  # fuzz does not ask for more
    monkeypatch.setattr(summary, "report_of", lambda folder, run_id: report(()))
    assert summary.finish(order, CLEAN) == CLEAN
    monkeypatch.setattr(summary, "report_of", lambda folder, run_id: None)
    assert summary.finish(order, CLEAN) == INFRASTRUCTURE, (
        "another run's report says nothing of this one"
    )


def passing() -> Evidence:
    """One variant, two dtypes, nothing failing."""
    data = evidence(cases=6)
    good = replace(data.variants[0], unavailable=None)
    verdicts = [verdict(good.ref, dtype, n) for dtype in ("float16", "bfloat16") for n in range(3)]
    verdicts = [v for v in verdicts if v.outcome == "pass"]
    return Evidence(runs=data.runs, variants=(good,), verdicts=tuple(verdicts))


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """SIGINT interrupts this process; a job in a shell's background is started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def the_campaign_is(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """From now on this command runs instead of a campaign's process."""

    def launch(name: str, program: Program) -> subprocess.Popen[bytes]:
        return subprocess.Popen(words, stdout=program.output, start_new_session=True)

    monkeypatch.setattr(starter, "launch", launch)


@pytest.mark.usefixtures("heeds_interrupts")
@pytest.mark.parametrize("sent", ["INT", "TERM"])
def test_an_interrupted_run_says_so_and_how_to_go_on(
    sent: str, at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = passing()
    order = recorded("ended", data)
    cases = len({v.case for v in data.verdicts})
    # The child sends the signal to this process, as a terminal or a job scheduler would.
    the_campaign_is(monkeypatch, "sh", "-c", f"kill -{sent} $PPID; sleep 60")
    words = ("run", PLAIN, "--examples", "7", "-k", "not long", "-x", "--run-id", order.run_id)
    assert command(monkeypatch, *words) == INFRASTRUCTURE
    output = capsys.readouterr().out
    assert f"interrupted after {cases} cases" in output
    assert f"verify run {PLAIN} --examples 7 -k 'not long' --exitfirst --run-id ended" in output
    assert "holds" not in output
    assert "report.html" not in output


def test_an_interrupted_run_keeps_its_conviction(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded("failed", evidence(cases=6))
    the_campaign_is(monkeypatch, "sh", "-c", "kill -TERM $PPID; sleep 60")
    assert command(monkeypatch, "fuzz", PLAIN, "--run-id", "failed") == FAILED
    assert "continue with: verify fuzz" in capsys.readouterr().out


def test_the_end_of_the_time_is_no_interruption(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded("timely", passing())
    the_campaign_is(monkeypatch, "sleep", "60")
    monkeypatch.setattr(runner, "_GRACE", 0.0)
    assert command(monkeypatch, "fuzz", PLAIN, "--run-id", "timely", "--max-time", "0.5") == CLEAN
    assert "interrupted" not in capsys.readouterr().out


# What cannot be written.


def test_a_directory_that_takes_nothing_is_told_in_one_line(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (at_home / ".verify").write_text("a file where a directory must be")
    assert command(monkeypatch, "run", PLAIN) == INFRASTRUCTURE
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert line.startswith("verify: cannot write evidence to .verify/runs/")


@pytest.mark.parametrize(
    "output",
    [
        "E   OSError: [Errno 28] No space left on device\nmore",
        "OSError: [Errno 30] Read-only file system: '.verify/runs/x'",
    ],
)
def test_a_disk_that_fills_is_told_in_one_line(
    output: str, at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded("full", passing())
    the_campaign_is(monkeypatch, "sh", "-c", f'echo "{output}"; exit 3')
    assert command(monkeypatch, "run", PLAIN, "--run-id", "full") == INFRASTRUCTURE
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert "cannot write evidence" in line


def test_what_pytest_refuses_is_a_usage_error(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded("refused", passing())
    said = "echo 'ERROR: run refused judged other sources'; exit 4"
    the_campaign_is(monkeypatch, "sh", "-c", said)
    assert command(monkeypatch, "run", PLAIN, "--run-id", "refused") == USAGE
    assert capsys.readouterr().out.strip() == "verify: run refused judged other sources"


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
    table, _, internal = (
        PAGE.read_text(encoding="utf-8").partition("## Environment")[2].partition("not for users:")
    )
    assert set(re.findall(r"^\| `(VERIFY_\w+)`", table, re.MULTILINE)) == known
    assert set(re.findall(r"VERIFY_\w+", internal)) == set(settings.INTERNAL)
    assert known <= set(re.findall(r"VERIFY_\w+", cli.app.help or ""))
