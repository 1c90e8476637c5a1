"""Replay: the cases that it repeats, its results, and one-line errors for illegal cases."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from references.masks import Causal, Window
from references.score_mods import Softcap
from tests.harness.fake_trials import DECLARED
from tests.harness.property_cases import SAMPLES
from verify.campaign.admission import unanswerable
from verify.campaign.run import open_run
from verify.campaign.targets import Target, excludes_group
from verify.cli import main
from verify.evidence import load
from verify.oracles import groups
from verify.problem import Layout, Problem
from verify.problem.case import Case
from verify.variant import GradientNumerics, Support

BOTH = replace(DECLARED, entries=("forward", "backward"), gradients=GradientNumerics())
GROUPS = [name for name in groups() if excludes_group(BOTH, name) is None]
PROBLEM = Problem(seqlen_q=4, seqlen_kv=6, head_dim=16, dtype="float32")

Replay = Callable[..., tuple[int, list[str]]]


def target(
    group: str = "accuracy", support: Support = BOTH.support, dtype: str = "float32"
) -> Target:
    declaration = replace(BOTH, support=support)
    return Target(declaration, declaration.configs[0], dtype, group)


@pytest.fixture
def replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Replay:
    """A function that runs `verify replay ID` in a fresh directory with copies of kernel files; it
    returns the exit code and the lines."""
    monkeypatch.chdir(tmp_path)
    for name in ("breaks_process", "correct_plain"):
        shutil.copy(SAMPLES / f"{name}.py", tmp_path)

    def replayed(case: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["verify", "replay", case])
        capfd.readouterr()
        status = main()
        output, errors = capfd.readouterr()
        assert "Traceback" not in output + errors
        return status, output.strip().splitlines()

    return replayed


# What is asked of a kernel is admitted, and nothing else.


@pytest.mark.first_look(6)
@pytest.mark.parametrize("group", GROUPS)
@settings(
    max_examples=15,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_what_is_drawn_is_admitted(group: str, data: st.DataObject) -> None:
    asked = target(group, dtype=data.draw(st.sampled_from(BOTH.support.dtypes)))
    if groups()[group].asks is not None:
        assert all(unanswerable(asked, problem) is None for problem in asked.asked)
        return
    problem = data.draw(asked.problems)
    assert unanswerable(asked, problem) is None, problem.name


NARROW = replace(BOTH.support, layouts="contiguous", masks=("full", "causal"))
REFUSED = [
    ("accuracy", {"dtype": "bfloat16"}, "outside the declared support: dtype: bfloat16 is none of"),
    ("accuracy", {"mask": Window(1, 1)}, "outside the declared support: mask: window"),
    ("accuracy", {"layout_q": Layout("bshd")}, "outside the declared support: layout_q: bshd"),
    ("gradients", {"layout_dout": Layout(pitch=8)}, "outside the declared support: layout_out"),
    ("accuracy", {"dtype_out": "float16"}, "dtype_out: float16 is not supported for float32"),
    ("counting", {}, "group counting asks dist=counting, not normal"),
    ("gather", {"distribution": "counting"}, "group gather asks dist=gather, not counting"),
    ("refusal", {}, "group refusal asks problems outside the support; this is inside"),
    ("contract", {}, "group contract asks no such problem"),
    (
        "key_shift",
        {"distribution": "small_integers", "score_mod": Softcap(1.0)},
        "softcap: is not supported",
    ),
    ("key_permutation", {"mask": Causal(), "seqlen_q": 6}, "group key_permutation asks no such"),
    ("nonsense", {}, "unknown group 'nonsense' (groups: accuracy, counting"),
]


@pytest.mark.parametrize(("group", "changes", "words"), REFUSED, ids=lambda value: str(value)[:25])
def test_what_cannot_be_asked_is_told_why(
    group: str, changes: dict[str, object], words: str
) -> None:
    why = unanswerable(target(group, NARROW), PROBLEM.but(**changes))
    assert why is not None
    assert words in why
    assert "\n" not in why


def test_a_forward_has_no_gradients_and_no_memory_holds_everything() -> None:
    forward = Target(DECLARED, DECLARED.configs[0], "float32", "gradients")
    assert (
        unanswerable(forward, PROBLEM)
        == "group gradients does not ask kernel, which has no backward of its own"
    )
    long = replace(BOTH.support, max_seqlen=None)
    for shape, words in (
        ({"seqlen_kv": 1 << 30}, "too large: q, k, v and out need 128 GiB"),
        (
            {"seqlen_q": 1 << 24, "seqlen_kv": 1 << 24, "head_dim": 8, "head_dim_v": 8},
            "pairs of a query",
        ),
    ):
        why = unanswerable(target(support=long), PROBLEM.but(**shape))
        assert why is not None
        assert words in why


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "none.py@x:default:accuracy:sq=1,skv=1,d=16,dtype=float32",
            "no such kernel file: none.py",
        ),
        (".@x:default:accuracy:sq=1,skv=1,d=16,dtype=float32", "no such kernel file: ."),
        (
            "correct_plain.py@correct_plain:default:nogroup:sq=1,skv=1,d=16,dtype=float32",
            "unknown group 'nogroup'",
        ),
        ("x:default:accuracy:sq=999999999,skv=999999999,d=16,dtype=float32", "too large: "),
        ("correct_plain.py@correct_plain:default:loading:-", "is not a field of a problem"),
    ],
    ids=["file", "folder", "group", "huge", "loading"],
)
def test_nonsense_is_one_line_before_anything_is_loaded(
    replay: Replay, case: str, words: str
) -> None:
    status, lines = replay(case)
    assert status == 2
    assert len(lines) == 1
    assert words in lines[0]
    assert not Path(".verify").exists()


def test_a_right_kernel_is_not_convicted_outside_its_support(replay: Replay) -> None:
    status, lines = replay(
        "correct_plain.py@correct_plain:default:accuracy:sq=3,skv=3,d=16,dtype=float32"
    )
    assert (status, len(lines)) == (2, 1)
    assert "outside the declared support: head_dim: 16 is not supported" in lines[0]


# Failures that need earlier calls.

CASE = "breaks_process.py@wrong-later:default:counting:sq=3,skv=5,d=16,dtype=float32,dist=counting"


def test_a_failure_that_needs_earlier_calls_is_repeated_with_them(replay: Replay) -> None:
    assert replay(CASE)[1][-1] == "HOLDS: no run in this directory has recorded that it failed"
    run = open_run("dev", [Path("breaks_process.py")], "campaign")
    judge = run.judge("main")
    for seed in (1, 2, 0):
        case = Case.parse(CASE if not seed else f"{CASE},seed={seed}")
        asked = run.target_of(case)
        assert asked is not None
        verdicts = judge.judge(asked, case.problem)
    judge.close()
    (wrong,) = [verdict for verdict in verdicts if verdict.outcome == "fail"]
    assert wrong.finding is not None
    assert wrong.finding.before == (f"{CASE},seed=1", f"{CASE},seed=2")
    status, lines = replay(CASE)
    assert status == 1
    assert "holds in a fresh process; again after 2 cases that had run before it" in lines
    assert lines[-1] == "FAILED: after 2 cases in the same process, not alone"
    path = Path("breaks_process.py")
    never = path.read_text().replace('STATE["calls"] > 2', "False")
    path.write_text(never)
    status, lines = replay(CASE)
    assert (status, lines[-1]) == (0, "FIXED: the kernel or the judge has changed since it failed")


def test_what_is_not_reproduced_is_not_fixed(replay: Replay) -> None:
    """A simulated race (a file decides): the same kernel fails in the campaign but not in the
    replay."""
    path = Path("breaks_process.py")
    late = Path("late").absolute()
    path.write_text(
        path.read_text().replace('STATE["calls"] > 2', f"os.path.exists({str(late)!r})")
    )
    run = open_run("dev", [path], "campaign")
    late.touch()
    judge, case = run.judge("main"), Case.parse(CASE)
    asked = run.target_of(case)
    assert asked is not None
    assert any(verdict.outcome == "fail" for verdict in judge.judge(asked, case.problem))
    judge.close()
    late.unlink()
    status, lines = replay(CASE)
    assert status == 3
    assert lines[-1].startswith(
        "NOT REPRODUCED: in a fresh process; the same kernel failed it in run campaign"
    )


def test_a_case_outside_todays_support_is_dropped_with_a_word(replay: Replay) -> None:
    state = Path(".verify")
    state.mkdir()
    (state / "known-failures.txt").write_text(f"{CASE}\n{CASE.replace('float32', 'float16')}\n")
    run = open_run("dev", [Path("breaks_process.py")], "campaign")
    assert [id_ for _, id_ in run.witnesses()] == [CASE]
    (left,) = load(run.directory).not_run
    assert (left.variant, left.dtype) == ("breaks_process.py@wrong-later", "(witness)")
    assert left.reason.startswith(
        "a case on record is dropped, outside the declared support: dtype: float16 is none of"
        " float32: breaks_process.py@"
    )
