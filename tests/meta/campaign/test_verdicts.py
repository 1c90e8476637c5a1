"""Tests of the judge: right kernels must pass, and each wrong kernel must be convicted by the right
oracle."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.harness.commands import verify
from tests.properties import tier
from verify.campaign.run import CampaignRun
from verify.campaign.targets import Target
from verify.cell import discovery
from verify.cell.process import ROOT
from verify.cli import main
from verify.evidence import Evidence, load
from verify.problem import Problem

SAMPLES = ROOT / "tests" / "sample_kernels"

CORRECT = "correct_declared"
UPCAST, PLAIN = "correct_upcast", "correct_plain"  # tried beside bad ones

# file -> oracles, one of which must convict
WRONG = {
    "wrong_scale": {"bound"},
    "wrong_alignment": {"bound", "counting"},
    "wrong_tail": {"bound", "counting", "gather"},
    "wrong_zeros": {"bound", "counting", "gather"},
    "wrong_lse": {"bound", "counting", "gather"},
    "wrong_nan": {"bound", "gather"},
    "wrong_precision": {"bound"},
    "coarse_table": {"kept_scores", "bound"},
    "returns_input": {"execution"},
    "returns_shape": {"execution"},
    "returns_dtype": {"execution"},
    "raises": {"execution"},
    "segfaults": {"execution"},
    "hangs": {"execution"},
    "exits": {"execution"},
    "writes_past": {"memory"},
    "scales_input": {"memory"},
    "forgets_rows": {"memory"},
    "not_repeatable": {"repeat"},
    "leaks_masked": {"poison"},
    "accepts_anything": {"refusal"},
    "wrong_rows.py@nan-rows": {"empty_rows"},
    "wrong_rows.py@head-map": {"gather"},
    "wrong_rows.py@reads-past-the-end": {"bound"},
    "wrong_rows.py@uncleared-workspace": {"repeat", "bound"},
    "declares_nothing": {"loading"},
    "does_not_import": {"loading"},
    "gradients.py@without-delta": {"gradient_bound"},
    "gradients.py@one-head": {"gradient_bound"},
    "gradients.py@without-scale": {"gradient_bound"},
    "gradients.py@without-tail": {"memory"},
    "gradients.py@accumulated": {"repeat"},
    "false_promises.py@fp16-accumulator": {"declared_numerics"},
    "false_promises.py@e4m3-probabilities": {"declared_numerics"},
    "false_promises.py@cubic-exponential": {"declared_numerics"},
    "false_promises.py@base-2-lse": {"contract"},
    "false_promises.py@exclusive-window": {"contract"},
}


# Within the bounds of rounded scores: a table is off by less than these.
COARSE = "sq=24,skv=40,d=64,dtype=float16,seed=3"

# The test of `tests/properties/test_attention.py` that hears these oracles, as pytest -k finds it.
HEARD_BY = {
    "bound": "_within_",
    "kept_scores": "_within_",
    "gradient_bound": "_within_",
    "execution": "_within_",
    "memory": "_within_",
    "repeat": "_within_",
    "empty_rows": "_within_",
    "counting": "counts_the",
    "gather": "gathers_the",
    "poison": "ignores_what",
    "refusal": "refuses_what",
    "contract": "keeps_its",
    "declared_numerics": "computes_as",
    "loading": "test_loads",
}

# Right variants in files with wrong ones: no oracle may convict them.
RIGHT = ("gradients.py@right", "false_promises.py@as-declared")

# The list of edge cases and the long sequences would take longer than all that is drawn.
DRAWN = "(not coverage_bins and not long_sequences)"

# Files of wrong kernels that end or damage the process in which they run
HARMFUL = ("segfaults", "hangs", "exits", "writes_past", "scales_input", "not_repeatable")

_FILES = list(dict.fromkeys(name.partition(".py@")[0] for name in WRONG))  # a file is tried whole


def asked(file: str) -> str:
    """The tests to run for a file, for pytest -k: those that can convict it; all of them if the
    file also holds a right backward."""
    oracles = {
        oracle for name in WRONG if name.partition(".py@")[0] == file for oracle in WRONG[name]
    }
    tests = " or ".join(sorted({HEARD_BY[oracle] for oracle in oracles}))
    return (
        f"/{file}.py and {DRAWN} and ({tests}{' or right-default' if file == 'gradients' else ''})"
    )


def trial_of(
    tmp_path: Path,
    *kernels: Path,
    select: str = DRAWN,
    examples: int = 12,
    shrink: float = 0,
    deadline: float = 4,
) -> tuple[int, Evidence, str]:
    """Run `verify run` on kernel files in a fresh directory; return exit code, evidence, output.

    shrink: seconds spent on a smaller case for each failing target; deadline: of one launch.
    """
    files = sorted({str(kernel) for kernel in kernels})
    words = ["-n", "0", "--profile", "ci", "--examples", examples, "-k", select]
    variables = {
        "VERIFY_DEADLINE": str(deadline),
        "VERIFY_SEARCH_SECONDS": "90",  # the examples are counted, on a slow machine too
        "VERIFY_SHRINK_SECONDS": str(shrink),
    }
    done = verify("run", *words, *files, cwd=tmp_path, variables=variables)
    (run,) = (tmp_path / ".verify" / "runs").iterdir()
    return done.returncode, load(run), done.stdout


def _is(ref: str, name: str) -> bool:
    file, _, variant = Path(ref).name.partition("@")
    wanted, wanted_at, wanted_variant = name.partition("@")
    return file.removesuffix(".py") == wanted.removesuffix(".py") and (
        not wanted_at or variant == wanted_variant
    )


@pytest.mark.for_ci
@pytest.mark.long(15)
@pytest.mark.parametrize("dtype", tier.thorough(["float16", "bfloat16", "float32"]))
def test_a_correct_kernel_passes_completely(dtype: str, tmp_path: Path) -> None:
    """Without a bin left empty."""
    dtypes, one = 'dtypes=("float16", "bfloat16", "float32")', f'dtypes=("{dtype}",)'
    source = (SAMPLES / f"{CORRECT}.py").read_text(encoding="utf-8")
    assert source.count(dtypes) == 1
    kernel = tmp_path / f"{CORRECT}.py"
    kernel.write_text(source.replace(dtypes, one), encoding="utf-8")
    select = "not long_sequences or n32"  # which one config is enough for
    status, evidence, output = trial_of(tmp_path, kernel, select=select, examples=5, deadline=60)
    assert status == 0, output
    assert {(v.variant, v.dtype) for v in evidence.verdicts} == {(f"{kernel}@correct", dtype)}


@pytest.mark.thorough
@pytest.mark.long(15)
@pytest.mark.parametrize("name", [PLAIN, UPCAST])
def test_a_plain_function_passes_completely(name: str, tmp_path: Path) -> None:
    """In every dtype; it is judged beside the wrong ones, too."""
    kernel = SAMPLES / f"{name}.py"
    select = "not long_sequences"
    status, evidence, output = trial_of(tmp_path, kernel, select=select, examples=5, deadline=60)
    assert status == 0, output
    assert {v.dtype for v in evidence.verdicts} == {"float16", "bfloat16", "float32"}


@pytest.mark.long(25)
def test_wrong_kernels_are_convicted_and_harm_no_other(tmp_path: Path) -> None:
    """All kernels in one run: each must be convicted by the right oracle, whatever the others do to
    their cells.  Correct ones among them pass: UPCAST, and PLAIN, which rounds its scores and P."""
    right = f"({DRAWN} and (/{UPCAST}.py and -float16 or /{PLAIN}.py and -bfloat16))"
    select = " or ".join([*map(asked, _FILES), right])
    files = (SAMPLES / f"{name.partition('.py')[0]}.py" for name in (*WRONG, UPCAST, PLAIN))
    status, evidence, output = trial_of(tmp_path, *files, select=select, deadline=1.5)
    assert status == 1, output
    for name, oracles in WRONG.items():
        convicted = convicting(evidence, name)
        assert convicted & oracles, f"{name}: convicted by {convicted or 'no oracle'}\n{output}"
    _are_right(evidence, output, 50, *RIGHT)


@pytest.mark.for_ci
@pytest.mark.long(15)
def test_right_kernels_pass_edge_cases_beside_those_that_harm_their_process(tmp_path: Path) -> None:
    """UPCAST in every dtype, with the edge cases of the finest, and PLAIN in the coarsest."""
    of_upcast = f"(/{UPCAST}.py and (-float32 or {DRAWN}))"
    whole = f"(not long_sequences and ({of_upcast} or (/{PLAIN}.py and -bfloat16)))"
    select = " or ".join([*map(asked, HARMFUL), whole])
    files = (SAMPLES / f"{name}.py" for name in (*HARMFUL, UPCAST, PLAIN))
    status, evidence, output = trial_of(tmp_path, *files, select=select, deadline=1.5)
    assert status == 1, output
    assert all(convicting(evidence, name) for name in HARMFUL), output
    _are_right(evidence, output, 200)


def _are_right(evidence: Evidence, output: str, least: int, *others: str) -> None:
    """UPCAST, PLAIN and the others are not convicted, of at least so many verdicts of the first."""
    for name in (UPCAST, PLAIN, *others):
        convicted = convicting(evidence, name)
        assert not convicted, f"{name}, right beside the wrong ones: by {convicted}\n{output}"
    for name in (UPCAST, PLAIN):
        assert len([v for v in evidence.verdicts if _is(v.variant, name)]) > least, output


def test_a_coarse_table_is_convicted_of_more_than_rounded_scores_can_cost(tmp_path: Path) -> None:
    """By one oracle alone, of a case that is within the weakest bounds."""
    run = CampaignRun(tmp_path / "run", "dev", (SAMPLES / "coarse_table.py",))
    (declared,) = run.roster.declarations
    judge = run.judge("main")
    try:
        target = Target(declared, declared.configs[0], "float16", "accuracy")
        verdicts = judge.judge(target, Problem.parse(COARSE))
    finally:
        judge.close()
    assert {v.oracle for v in verdicts if v.outcome == "fail"} == {"kept_scores"}


def convicting(evidence: Evidence, name: str) -> set[str]:
    """The oracles that convicted a kernel."""
    return {v.oracle for v in evidence.verdicts if v.outcome == "fail" and _is(v.variant, name)}


@pytest.mark.long(12)
def test_a_failure_is_shrunk_explained_and_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    select = f"{asked('wrong_tail')} and float32"  # one target of each group
    _, evidence, output = trial_of(tmp_path, SAMPLES / "wrong_tail.py", select=select, shrink=2)
    shrunk = [v for v in evidence.verdicts if v.outcome == "fail" and v.phase == "shrink"]
    smallest = min(shrunk, key=lambda v: len(v.case))
    assert "b=" not in smallest.problem.split(",")[0], (
        f"not shrunk to one sequence: {smallest.problem}"
    )
    for word in ("variant", "config", "oracle", "got", "bound", "where", "problem", "replay"):
        assert f"  {word}" in output
    assert smallest.finding is not None
    python, *words = shlex.split(smallest.finding.replay)
    assert (python, words[:2]) == ("python", ["-m", "verify"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["verify", *words[2:]])
    assert main() == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ("replay", "nonsense"),
        ("replay", "triton-flash-forward:m128n64w4s2:accuracy:sq=8,skv=8,d=64,dtype=float17"),
        (
            "replay",
            "triton-flash-forward:m128n64w8s2:accuracy:sq=8,skv=8,d=64,dtype=float16,dist=nosuch",
        ),
        (
            "replay",
            "triton-flash-forward:m128n64w8s2:gather:sq=8,skv=800,d=8,dtype=float16,dist=gather",
        ),
        ("replay", "no-such-variant:default:accuracy:sq=8,skv=8,d=64,dtype=float16"),
        ("run", "no_such_file.py"),
        ("run", "--run-id", "a/b"),
        ("compare", "here.json", "there.json"),
        ("no-such-command",),
    ],
)
def test_bad_usage_gets_one_clear_line(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["verify", *arguments])
    # An unknown variant is told from those of the whole collection: here of a part.
    few = [path for path in discovery.collection() if path.stem in ("math", "cpu_flash")]
    monkeypatch.setattr(discovery, "collection", lambda: few)
    assert main() == 2
    output, errors = capfd.readouterr()
    assert len(output.strip().splitlines()) == 1, output
    assert "Traceback" not in output + errors


def test_another_schema_is_refused_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"schema": 99}))
    monkeypatch.setattr(sys, "argv", ["verify", "compare", str(path), str(path)])
    assert main() == 2
    output, errors = capfd.readouterr()
    assert len(output.strip().splitlines()) == 1
    assert "99" in output
    assert not errors
