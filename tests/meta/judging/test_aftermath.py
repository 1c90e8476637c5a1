"""Processes that a kernel breaks: no variant is convicted for what another variant of the file left
behind, and what needs earlier calls is on record with them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from tests.harness.property_cases import SAMPLES, Bench, bench
from verify.campaign.targets import Target
from verify.cell.process import Cell, Environment, InfrastructureError, Reply
from verify.evidence import Verdict, load
from verify.evidence.explanation import explain
from verify.judging.aftermath import blamed, outcome, ruling
from verify.judging.history import MOST, Hearing, History, judges
from verify.problem import Problem

PROBLEM = Problem(seqlen_q=3, seqlen_kv=5, head_dim=16, dtype="float32")
FILE = str(SAMPLES / "breaks_process.py")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench("breaks_process.py", tmp_path_factory.mktemp("broken")) as made:
        yield made


@pytest.fixture
def broken(opened: Bench) -> Bench:
    """The bench, with a process in which nothing has run."""
    opened.judge.restart_process(opened.variants["innocent"])
    return opened


def heard(bench: Bench, variant: str, seed: int = 0) -> dict[str, Verdict]:
    declaration = bench.variants[variant]
    target = Target(declaration, declaration.configs[0], "float32", "counting")
    problem = PROBLEM.but(seed=seed, distribution="counting")
    return {verdict.oracle: verdict for verdict in bench.judge.judge(target, problem)}


def test_the_judges_own_error_is_never_a_conviction(broken: Bench) -> None:
    heard(broken, "breaks-the-judge")
    found = heard(broken, "innocent")
    assert {v.outcome for name, v in found.items() if name != "aftermath"} == {"pass"}
    case, folder = found["execution"].case, broken.judge.recorder.path.parent
    kept = load(folder).verdict_of(case, "aftermath")  # as it is read back
    assert kept is not None
    assert kept.outcome == "inapplicable"
    assert kept.variant == FILE
    assert kept.finding is not None
    assert "AttributeError" in kept.finding.message
    assert "in the judge's own code" in kept.finding.message
    assert [case.split("@")[1].split(":")[0] for case in kept.finding.before] == [
        "breaks-the-judge"
    ]


def test_an_error_of_the_judge_that_persists_names_the_variant(tmp_path: Path) -> None:
    with (
        bench("breaks_every_process.py", tmp_path) as opened,
        pytest.raises(InfrastructureError) as failed,
    ):
        heard(opened, "unheard")
    text = str(failed.value)
    assert (
        "breaks_every_process.py@unheard: the judge's own code raised in 2 fresh processes" in text
    )
    assert "AttributeError" in text
    assert not load(tmp_path).verdicts


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ("breaks-by-crash", "crashes in a process"),
        ("breaks-by-raise", "raises in the kernel in a process"),
        ("breaks-by-hang", "hangs in a process"),
    ],
)
def test_what_does_not_fail_alone_is_held_against_the_file(
    broken: Bench, variant: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFY_DEADLINE", "2")
    heard(broken, variant)
    found = heard(broken, "innocent", seed=1)
    charge = found.pop("aftermath")
    assert {v.outcome for v in found.values()} == {"pass"}, "the innocent variant"
    assert (charge.outcome, charge.variant) == ("fail", FILE)
    assert charge.finding is not None
    assert words in charge.finding.message
    assert (
        f"1 case had run before it in that process: of {FILE}@{variant}" in charge.finding.message
    )
    assert charge.finding.before_count == len(charge.finding.before) == 1
    assert "after    other cases in the same process: 1" in explain(charge)
    assert heard(broken, "innocent", seed=2)["execution"].outcome == "pass"


def test_what_breaks_its_own_process_is_to_blame_itself(broken: Bench) -> None:
    """Its second launch dies, alone of its file."""
    found = heard(broken, "breaks-by-raise")
    assert found["execution"].outcome == "pass"
    again = heard(broken, "breaks-by-raise", seed=3)
    assert again["execution"].outcome == "pass"
    charge = again["aftermath"]
    assert (charge.outcome, charge.variant) == ("fail", f"{FILE}@breaks-by-raise")


def test_what_fails_alone_too_is_a_plain_conviction(tmp_path: Path) -> None:
    with bench("raises.py", tmp_path) as opened:
        (name,) = opened.variants
        declaration = opened.variants[name]
        target = Target(declaration, declaration.configs[0], "float32", "accuracy")
        for seed in (1, 2):
            shape = {"seqlen_q": 3, "seqlen_kv": 3, "head_dim": declaration.support.head_dims[0]}
            (verdict,) = opened.judge.judge(target, Problem(**shape, dtype="float32", seed=seed))
            assert (verdict.oracle, verdict.outcome) == ("execution", "fail")
            assert verdict.finding is not None
            assert verdict.finding.before == ()


def test_a_wrong_number_is_a_conviction_with_the_cases_before_it(broken: Bench) -> None:
    cases = [heard(broken, "wrong-later", seed=seed) for seed in range(3)]
    late = next(found for found in cases if any(v.outcome == "fail" for v in found.values()))
    wrong = next(v for v in late.values() if v.outcome == "fail")
    assert wrong.variant == f"{FILE}@wrong-later"
    assert wrong.finding is not None
    number = cases.index(late)
    assert number > 0, "the first case alone holds"
    assert [case.rpartition("seed=")[2] for case in wrong.finding.before] == [
        cases[n]["execution"].case.rpartition("seed=")[2] for n in range(number)
    ]


def test_a_history_is_bounded_and_counts_all() -> None:
    history = History()
    for number in range(40):
        history.launched(1, f"file@a:c:g:{number}")
        history.launched(1, f"file@a:c:g:{number}")  # a case launches more than once
    before, first = history.launched(1, "file@b:c:g:40")
    assert (len(before.cases), before.count, first) == (MOST, 40, False)
    assert before.cases[-1] == "file@a:c:g:39"
    assert before.variants == {"file@a"}
    assert before.told == (
        "40 cases had run before it in that process, the last 32 on record: of file@a"
    )
    before, first = history.launched(2, "file@b:c:g:41")
    assert (before.cases, before.count, first) == ((), 0, True)


def test_whose_code_raised_is_said_by_the_cell() -> None:
    assert judges(Reply("raised", data={"judge": True}))
    assert not judges(Reply("raised", data={"judge": False}))
    assert not judges(Reply("crash", data={"judge": True}))
    assert Hearing().before.told == "no other case had run before it in that process"


class FakeCell:
    """Stands for a cell whose launches are made elsewhere."""

    process_number = 1
    environment = Environment("fake", "cpu")

    def restart(self) -> None:
        self.process_number += 1


OUT_OF_MEMORY = Reply("out of memory", "CUDA out of memory")
BUSY = Reply("device busy", "CUDA error: CUDA-capable device(s) is/are busy or unavailable")
HANG = Reply("hang", "no answer within 60 s; killed")


@pytest.mark.parametrize("before", [0, 2])
def test_a_hang_convicts_if_it_comes_again_where_nothing_has_run(before: int) -> None:
    history, cell = History(), FakeCell()
    for number in range(before):
        history.launched(cell.process_number, f"kernel:default:accuracy:{number}")
    hearing = Hearing("kernel:default:accuracy:last", history)
    replies = [HANG, HANG, Reply("ok")]
    assert hearing.ask(cast(Cell, cell), lambda: replies.pop(0)) == HANG
    assert (cell.process_number, len(replies)) == (2, 1), "repeated once, in a fresh process"
    assert not hearing.aftermaths


@pytest.mark.parametrize(
    ("before", "wanted", "words"),
    [
        (0, "inapplicable", "hangs in a fresh process, and works in another one: no other case"),
        (
            2,
            "fail",
            "hangs in a process that earlier launches had used, and works in a fresh one: 2 cases",
        ),
    ],
)
def test_a_hang_that_does_not_come_again_is_on_record(before: int, wanted: str, words: str) -> None:
    history, cell = History(), FakeCell()
    for number in range(before):
        history.launched(cell.process_number, f"kernel:default:accuracy:{number}")
    hearing = Hearing("kernel:default:accuracy:last", history)
    replies = iter([HANG, Reply("ok")])
    assert hearing.ask(cast(Cell, cell), lambda: next(replies)).ok
    (met,) = hearing.aftermaths
    assert outcome(met) == wanted
    finding = ruling(met).finding
    assert finding is not None
    assert finding.message.startswith(words)


@pytest.mark.parametrize("crowded", [OUT_OF_MEMORY, BUSY], ids=lambda reply: reply.status)
@pytest.mark.parametrize("before", [0, 2])
def test_what_others_took_is_asked_for_again_and_convicts_nobody(
    before: int, crowded: Reply, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verify.judging.history._PAUSE", 0.0)
    history, cell = History(), FakeCell()
    for number in range(before):
        history.launched(cell.process_number, f"kernel:default:accuracy:{number}")
    replies = iter([crowded, crowded, Reply("ok")])
    hearing = Hearing("kernel:default:accuracy:last", history)
    assert hearing.ask(cast(Cell, cell), lambda: next(replies)).ok
    (met,) = hearing.aftermaths
    assert outcome(met) == "inapplicable"
    assert cell.process_number == 3
    # A report has no row for the file, which would be one without a declaration.
    others = replace(met, before=replace(met.before, variants=frozenset({"kernel", "other"})))
    assert blamed(others, "kernel", "kernels/file.py") == "kernel"
    hung = replace(others, reply=HANG)
    assert blamed(hung, "kernel", "kernels/file.py") == "kernels/file.py"


def test_memory_that_lacks_in_every_fresh_process_is_a_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("verify.judging.history._PAUSE", 0.0)
    hearing = Hearing("kernel:default:accuracy:last", History())
    assert hearing.ask(cast(Cell, FakeCell()), lambda: OUT_OF_MEMORY) == OUT_OF_MEMORY
    assert not hearing.aftermaths


class GpuCell(FakeCell):
    """The same on a GPU."""

    environment = Environment("fake", "cuda")


def full(room: int) -> Reply:
    """No memory, where the device had `room` of 80 GiB."""
    data = {"on_device": True, "room": room << 30, "total": 80 << 30}
    return replace(OUT_OF_MEMORY, data=data)


def test_memory_of_a_gpu_that_others_hold_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verify.judging.history._PAUSE", 0.0)
    monkeypatch.setenv("VERIFY_LIFE_MEMORY", "16")
    hearing = Hearing("kernel:default:accuracy:last", History())
    with pytest.raises(InfrastructureError, match=r"left 15\.0 of 80\.0 GiB; use fewer workers"):
        hearing.ask(cast(Cell, GpuCell()), lambda: full(15))
    nothing = replace(OUT_OF_MEMORY, data={"on_device": True})  # CUDA cannot start
    with pytest.raises(InfrastructureError, match="left nothing; use fewer workers"):
        hearing.ask(cast(Cell, GpuCell()), lambda: nothing)
    assert not hearing.aftermaths
    with pytest.raises(InfrastructureError, match="the GPU takes no further process"):
        hearing.ask(cast(Cell, GpuCell()), lambda: replace(BUSY, data={"on_device": True}))
    assert not hearing.aftermaths
    # What any kernel may take was there; and the host's memory is the kernel's own.
    of_host = replace(full(1), data=full(1).data | {"on_device": False})
    for reply in (full(16), of_host, OUT_OF_MEMORY):
        assert hearing.ask(cast(Cell, GpuCell()), lambda reply=reply: reply) == reply


def test_a_launch_without_memory_is_repeated_beside_the_others_and_then_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: list[str] = []
    for kind in ("shared", "alone"):

        @contextlib.contextmanager
        def turn(self: object, kind: str = kind) -> Iterator[None]:
            turns.append(f"{kind} begins")
            yield
            turns.append(f"{kind} ends")

        monkeypatch.setattr(f"verify.machine.turns.Turns.{kind}", turn)
    monkeypatch.setattr("verify.judging.history._PAUSE", 0.0)
    failed = ["shared begins", "out of memory", "shared ends"]
    for times, last in ((1, "shared"), (3, "shared"), (4, "alone")):
        turns.clear()
        replies = [full(1)] * times + [Reply("ok")]

        def ask(replies: list[Reply] = replies) -> Reply:
            turns.append(replies[0].status)
            return replies.pop(0)

        hearing = Hearing("kernel:default:accuracy:last", History())
        assert hearing.ask(cast(Cell, GpuCell()), ask).ok
        assert turns == [*failed * times, f"{last} begins", "ok", f"{last} ends"]
        assert [outcome(met) for met in hearing.aftermaths] == ["inapplicable"]
