"""Launches of one case in one message: the same verdicts as launch by launch, and a failure is that
of its own launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.property_cases import Bench, bench
from verify.campaign.targets import Target
from verify.cell.process import Cell
from verify.evidence import Verdict
from verify.problem import Problem

PROBLEM = Problem(seqlen_q=3, seqlen_kv=5, head_dim=16, dtype="float32", seed=5)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench("fails_in_a_later_launch.py", tmp_path_factory.mktemp("later")) as made:
        yield made


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The messages to kernel processes, by their kind."""
    found: Counter[str] = Counter()
    asked = Cell._ask

    def counted(cell: Cell, message: dict[str, Any], *rest: Any, **more: Any) -> Any:
        found[message["op"]] += 1
        return asked(cell, message, *rest, **more)

    monkeypatch.setattr(Cell, "_ask", counted)
    return found


def judged(opened: Bench, variant: str, group: str) -> dict[str, Verdict]:
    """The verdicts by oracle on a case in a fresh process."""
    declaration = opened.variants[variant]
    opened.judge.restart_process(declaration)
    target = Target(declaration, declaration.configs[0], "float32", group)
    return {verdict.oracle: verdict for verdict in opened.judge.judge(target, PROBLEM)}


def said(found: dict[str, Verdict]) -> dict[str, tuple[object, ...]]:
    """What does not differ from run to run; of a traceback or a log only the first line."""
    return {
        name: (
            v.outcome,
            v.measures,
            v.observed,
            v.finding and (v.finding.message.partition("\n")[0], v.finding.where, v.finding.before),
        )
        for name, v in found.items()
    }


@pytest.mark.first_look(3)
@pytest.mark.parametrize(
    ("variant", "group", "guilty", "words"),
    [
        ("honest", "linearity", "", ""),
        ("honest", "relaunch", "", ""),
        ("aborts", "linearity", "linearity", "crashes: killed by SIGABRT"),
        ("raises", "linearity", "linearity", "raises: RuntimeError: no room for the parts"),
        ("writes-past-the-end", "linearity", "linearity", "writes outside its outputs: 4 bytes"),
        ("writes-before-the-arena", "linearity", "linearity", "bytes before q"),
        ("second-call-aborts", "linearity", "aftermath", "crashes in a process"),
        ("keeps-k", "relaunch", "relaunch", "launched after another problem of its shapes"),
        ("keeps-its-output", "accuracy", "repeat", "unwritten"),
    ],
)
def test_one_message_gives_the_verdicts_of_several(
    opened: Bench,
    messages: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    group: str,
    guilty: str,
    words: str,
) -> None:
    together = judged(opened, variant, group)
    assert messages["several"] == 1
    if not guilty:
        assert not messages["run"]
    assert [name for name, v in together.items() if v.outcome == "fail"] == [guilty] * bool(guilty)
    if guilty:
        finding = together[guilty].finding
        assert finding is not None
        assert words in finding.message
    monkeypatch.setattr(Cell, "runs_several", lambda cell, variant: False)
    assert said(judged(opened, variant, group)) == said(together)
    assert messages["several"] == 1


def test_a_crash_that_does_not_come_again_is_an_aftermath(
    opened: Bench, messages: Counter[str]
) -> None:
    for mark in Path("/dev/shm").glob("verify-test-*"):
        mark.unlink()
    found = judged(opened, "aborts-once", "linearity")
    for mark in Path("/dev/shm").glob("verify-test-*"):
        mark.unlink()
    assert messages["run"] >= 3  # launch by launch
    charge = found.pop("aftermath")
    assert {v.outcome for v in found.values()} == {"pass"}
    assert charge.outcome == "fail"
    assert charge.finding is not None
    assert "crashes" in charge.finding.message


@pytest.mark.for_ci
def test_a_launch_that_hangs_is_the_one_that_is_convicted(
    opened: Bench, messages: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFY_DEADLINE", "2")
    found = judged(opened, "hangs", "linearity")
    assert [name for name, v in found.items() if v.outcome == "fail"] == ["linearity"]
    assert found["linearity"].finding is not None
    assert "hangs: no answer within 2 s" in found["linearity"].finding.message


def test_what_takes_long_is_left_to_messages_of_their_own(
    opened: Bench, messages: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No launch begins in a message whose time to begin is over."""
    monkeypatch.setattr("verify.cell.process._BUDGET", 1e12)
    found = judged(opened, "honest", "linearity")
    assert {v.outcome for v in found.values()} == {"pass"}
    assert messages["several"] == 1
    assert messages["run"] == 2


@pytest.mark.parametrize("kept", [None, [], [0] * 9, {"a": 1}])
def test_a_reply_to_other_launches_counts_for_nothing(
    opened: Bench, messages: Counter[str], monkeypatch: pytest.MonkeyPatch, kept: object
) -> None:
    asked = Cell._ask

    def forged(cell: Cell, message: dict[str, Any], *rest: Any, **more: Any) -> Any:
        reply = asked(cell, message, *rest, **more)
        if message["op"] == "several":
            reply.data["kept_by"] = kept
        return reply

    monkeypatch.setattr(Cell, "_ask", forged)
    found = judged(opened, "honest", "linearity")
    assert messages["run"] == 3
    assert {v.outcome for name, v in found.items() if name != "aftermath"} == {"pass"}
    assert found["aftermath"].outcome == "fail"  # it is no launch that went well
