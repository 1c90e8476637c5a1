"""The watch over GPUs: when they judge the control problem, and what follows if it is wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from verify.campaign import halt
from verify.campaign.gpus import accounting, control_process, state
from verify.campaign.gpus.control_process import Answer
from verify.campaign.gpus.watch import ControlProcess, Watch, gpu_of
from verify.campaign.leases import control
from verify.machine import device

A, B = (f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "ab")
RIGHT, WRONG = Answer(made=True), Answer(made=True, wrong="wrong in 1 row")


@dataclass
class Fake:
    """Control problems that take two seconds of a clock that every look at it moves."""

    now: float = 0.0
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    begun: list[tuple[float, str]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def clock(self) -> float:
        self.now += 0.01
        return self.now

    def start(self, gpu: str) -> object:
        self.begun.append((round(self.now), gpu))
        at = self.now + 2
        said = self.answers.get(gpu, [])
        answer = said.pop(0) if said else RIGHT
        return SimpleNamespace(
            answer=lambda: answer if self.now >= at else None, end=lambda: self.ended.append(gpu)
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return Fake()


@pytest.fixture
def watch(fake: Fake, tmp_path: Path) -> Watch:
    return Watch(tmp_path / "run", fake.start, fake.clock)  # type: ignore[arg-type]


def test_a_gpu_begins_with_the_control_problem_and_ends_a_short_run_without(
    fake: Fake, watch: Watch
) -> None:
    for gpu in (A, B, A, ""):
        watch.join(gpu)
    assert fake.begun == [(0, A), (0, B)]
    fake.now = 50
    watch.look()
    assert watch.finish() == ""
    assert len(fake.begun) == 2
    assert state.read(watch.run) == {A: state.Gpu(1), B: state.Gpu(1)}


def test_a_failing_test_accuses_its_gpu_but_not_too_often(fake: Fake, watch: Watch) -> None:
    watch.join(A)
    watch.join(B)
    fake.now = 40
    for _ in range(3):
        watch.accuse(B)
        watch.look()
    fake.now = 55
    watch.accuse(B)
    watch.look()
    assert fake.begun[2:] == [(40, B)]
    assert watch.finish() == ""
    assert fake.begun[3:] == [(55, B)]


def test_a_long_run_has_one_every_minute_and_at_its_end(fake: Fake, watch: Watch) -> None:
    watch.join(A)
    for fake.now in (30, 61, 90, 122):
        watch.look()
    fake.now = 200
    watch.finish()
    assert [time for time, _ in fake.begun] == [0, 61, 122, 200]
    assert state.read(watch.run)[A].controls == 4


def test_the_end_does_not_wait_for_another_one(fake: Fake, watch: Watch) -> None:
    watch.join(A)
    for fake.now in (61, 70):
        watch.look()
    fake.now = 110
    watch.finish()
    assert [time for time, _ in fake.begun] == [0, 61]


@pytest.mark.parametrize("later", [False, True])
def test_a_wrong_gpu_is_quarantined_and_its_evidence_does_not_count(
    later: bool, fake: Fake, watch: Watch
) -> None:
    fake.answers = {B: [RIGHT, WRONG] if later else [WRONG]}
    watch.join(A)
    watch.join(B)
    for gpu in (A, B):
        path = watch.run / f"{state.recorder_name('gw0', gpu)}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("evidence\n")
    halt.stop_at_quarantine(watch.run / state.MARKER)
    try:
        fake.now = 5
        watch.look()
        assert halt.over() == (not later)
        watch.accuse(B)
        assert watch.finish() == f"{B} is quarantined: wrong in 1 row"
        assert halt.stopped() == "a GPU is quarantined"
    finally:
        halt.stop_at_quarantine(None)
    assert state.quarantined(watch.run) == {B: "wrong in 1 row"}
    assert (len(state.files_of(watch.run, A)), len(state.files_of(watch.run, B))) == (1, 0)
    assert len(state.files_of(watch.run, B, out=True)) == 1


@pytest.mark.parametrize("answer", [Answer(made=False), None])
def test_one_that_is_not_made_says_nothing(answer: Answer | None, fake: Fake, watch: Watch) -> None:
    """The GPU's memory is full, or the machine is busy."""
    watch.join(A)
    if answer is None:
        watch._gpus[A].control.answer = lambda: None  # type: ignore[union-attr,method-assign]
    else:
        fake.answers = {B: [answer]}
        watch.join(B)
    assert watch.finish() == ""
    assert fake.ended == ([A] if answer is None else [])
    assert not state.quarantined(watch.run)


def test_reports_accuse_the_gpu_of_their_worker(
    fake: Fake, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_known", [["0", A, "H", "9.0", "1"], ["1", B, "H", "9.0", "1"]])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [gpu_of(worker) for worker in ("gw0", "gw1", "gw2", "main")] == [A, B, A, A]
    nodes = [SimpleNamespace(gateway=SimpleNamespace(id=f"gw{n}")) for n in range(4)]
    for node in nodes:
        watch.pytest_configure_node(node)
    watch.pytest_runtestloop()
    assert [gpu for _, gpu in fake.begun] == [A, B]
    fake.now = 40
    for node, failed in zip(nodes, (False, False, False, True), strict=True):
        watch.pytest_runtest_logreport(SimpleNamespace(failed=failed, node=node))  # type: ignore[arg-type]
    assert fake.begun[2:] == [(40, B)]


def test_a_process_without_workers_has_the_first_gpu(
    fake: Fake, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_known", [["0", A, "H", "9.0", "1"]])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    watch.pytest_runtestloop()
    fake.now = 40
    watch.pytest_runtest_logreport(SimpleNamespace(failed=True))  # type: ignore[arg-type]
    assert fake.begun == [(0, A), (40, A)]


def test_without_a_gpu_there_is_nothing_to_watch(
    fake: Fake, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_known", [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert gpu_of("gw1") == ""
    watch.pytest_runtestloop()
    assert watch.finish() == ""
    assert not fake.begun


def _raises(message: str):
    def check(seed: int, device: str | None) -> str:
        raise torch.OutOfMemoryError(message) if "memory" in message else RuntimeError(message)

    return check


@pytest.mark.parametrize(
    ("check", "made", "wrong"),
    [
        (lambda seed, device: "", True, ""),
        (lambda seed, device: "wrong", True, "wrong"),
        (_raises("CUDA out of memory."), False, ""),
        (_raises("CUDA error: all CUDA-capable devices are busy or unavailable"), False, ""),
        (
            _raises("CUDA error: uncorrectable ECC error\nmore"),
            True,
            "the control problem was not computed: CUDA error: uncorrectable ECC error",
        ),
    ],
)
def test_what_others_do_is_no_fault_of_a_gpu(
    check, made: bool, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "check", check)
    threads = torch.get_num_threads()
    try:
        found = control_process.answer(3)
    finally:
        torch.set_num_threads(threads)
    assert (found.made, found.wrong) == (made, wrong)


@pytest.mark.parametrize(
    ("cuda", "mask", "device"), [("12.8", A, "cuda"), ("12.8", "", None), (None, A, None)]
)
def test_the_cpu_does_not_speak_for_a_gpu_that_is_gone(
    cuda: str | None, mask: str, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(control, "check", lambda seed, device: asked.append(device) or "")
    assert control_process.answer(3).made
    assert asked == [device]


@pytest.mark.for_ci
def test_a_control_process_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = ControlProcess.start("")  # no GPU: it computes on the CPU
    begun.process.wait(120)
    answer = begun.answer()
    assert answer is not None
    assert (answer.made, answer.wrong) == (True, "")
    assert answer.seconds > 0
    begun = ControlProcess.start("")
    begun.process.kill()
    begun.process.wait(60)
    assert begun.answer() == Answer(made=False)
    begun = ControlProcess.start("")
    assert begun.answer() is None
    begun.end()
    assert begun.process.poll() is not None


def test_accounts_count_what_evidence_says(tmp_path: Path) -> None:
    def line(kind: str, case: str, time: float, outcome: str = "") -> str:
        return json.dumps({"kind": kind, "case": case, "time": time, "outcome": outcome, "x": [1]})

    first = [line("begin", "a", 10), line("passed", "a", 12), line("begin", "b", 20)]
    first += [line("verdict", "b", 21, "fail"), line("verdict", "b", 22, "pass"), '{"kind": "ver']
    state.write(tmp_path, {A: state.Gpu(3), B: state.Gpu(1, "wrong")})
    (tmp_path / f"{state.recorder_name('gw0', A)}.jsonl").write_text("\n".join(first))
    (tmp_path / f"{state.recorder_name('gw2', A)}.jsonl").write_text(line("begin", "c", 5))
    (tmp_path / f"{state.recorder_name('gw1', B)}.jsonl").write_text("\n".join(first[:2]))
    state.take_out(tmp_path)
    good, bad = accounting.remember(tmp_path)
    assert good == accounting.Account(A, workers=2, cases=3, failing=1, busy=4.0, controls=3)
    assert bad == accounting.Account(
        B, workers=1, cases=1, failing=0, busy=2.0, controls=1, quarantined="wrong"
    )
    assert json.loads((tmp_path / "accounting.json").read_text())[1]["quarantined"] == "wrong"
    assert accounting.remember(tmp_path / "other") == []
