"""The coordinator over simulated workers: what it gives to whom, and what becomes of evidence."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from tests.harness.simulated_engine import SLUG, Simulated, units
from verify.campaign.leases import accounting
from verify.campaign.leases.coordinator import ContinuedError, Coordinator, Plan
from verify.campaign.leases.engine import EngineError
from verify.campaign.leases.events import Done, Quarantined
from verify.campaign.leases.executor import Spec
from verify.campaign.leases.merged import Merged
from verify.campaign.leases.requests import Work

SEEDS = (0, 1, 2, 3)


def plan(**changes: object) -> Plan:
    values = {"spec": Spec(campaign="c", arguments=()), "seeds": SEEDS, "sources": "same"}
    return Plan(**(values | changes))  # type: ignore[arg-type]


def begun(folder: Path, engine: Simulated, asked: Plan | None = None) -> Coordinator:
    coordinator = Coordinator(
        asked or plan(),
        Merged(folder / "c", folder / "runs"),
        engine,
        clock=engine.clock,
    )
    coordinator.open()
    return coordinator


def ran(folder: Path, engine: Simulated, asked: Plan | None = None) -> Coordinator:
    coordinator = begun(folder, engine, asked)
    coordinator.run()
    coordinator.close()
    return coordinator


def line(order: Work) -> bytes:
    return json.dumps({"lease": order.lease}).encode() + b"\n"


def merged_lines(coordinator: Coordinator) -> Counter[str]:
    """How often the evidence of each lease is in the merged run."""
    found: Counter[str] = Counter()
    for path in coordinator.merged.run(SLUG).glob("device-*.jsonl"):
        for text in path.read_text().splitlines():
            found[json.loads(text).get("lease", "")] += 1
    del found[""]
    return found


def test_every_lease_is_done_once(tmp_path: Path) -> None:
    engine = Simulated(evidence=line, seconds=lambda draw: draw.uniform(1, 3))
    coordinator = ran(tmp_path, engine)
    assert (coordinator.state.open, len(engine.given)) == (0, 24)
    assert merged_lines(coordinator) == Counter(dict.fromkeys(coordinator.state.all, 1))
    by_account = {each.device: each for each in accounting.accounts(coordinator.events())}
    assert sum(each.leases for each in by_account.values()) == 24
    assert all(each.controls == 2 for each in by_account.values())  # before, and at the end
    assert {each.kind for each in by_account.values()} == {SLUG}


def test_lost_workers_leases_are_given_again(tmp_path: Path) -> None:
    engine = Simulated(evidence=line, dying=lambda worker, order: len(worker) < 4)
    coordinator = ran(tmp_path, engine)
    assert coordinator.state.open == 0
    assert sum(coordinator.state.losses.values()) == 6  # each of three twice: w0, w0+
    assert merged_lines(coordinator) == Counter(dict.fromkeys(coordinator.state.all, 1))


def test_other_sources_get_no_lease(tmp_path: Path) -> None:
    said: list[str] = []
    engine = Simulated(sources={"w1": "edited"})
    coordinator = begun(tmp_path, engine)
    coordinator.say = said.append
    coordinator.run()
    assert {worker for worker, _ in engine.given} == {"w0", "w2"}
    assert ["w1 gets no lease" in text and "edited" in text for text in said] == [True]
    coordinator.close()


def test_no_worker_that_may_is_the_end(tmp_path: Path) -> None:
    engine = Simulated(sources={f"w{n}": "edited" for n in range(3)})
    coordinator = ran(tmp_path, engine)
    assert engine.now < 10
    assert not coordinator.state.units
    assert len(coordinator.refused) == 3


def test_a_refused_worker_does_not_end_what_others_begin(tmp_path: Path) -> None:
    engine = Simulated(sources={"w0": "edited"}, start={"w1": 90.0, "w2": 90.0})
    coordinator = ran(tmp_path, engine)
    assert coordinator.state.open == 0
    assert {worker for worker, _ in engine.given} == {"w1", "w2"}


def test_a_wrong_control_problem_takes_a_device_and_its_evidence_out(tmp_path: Path) -> None:
    """It was right at first: what was done between the two is done again elsewhere."""
    said: list[str] = []
    engine = Simulated(evidence=line, wrong={"w1": 3})
    coordinator = begun(tmp_path, engine)
    coordinator.say = said.append
    coordinator.run()
    coordinator.close()
    state = coordinator.state
    bad = "host/GPU-w1"
    assert list(state.quarantined) == [bad]
    assert [bad in text and "1 of 4096" in text for text in said] == [True]
    assert state.open == 0
    assert all(done.device != bad for done in state.done.values())
    assert merged_lines(coordinator) == Counter(dict.fromkeys(state.all, 1))
    (kept,) = (tmp_path / "c" / "quarantined").iterdir()
    assert len(kept.read_text().splitlines()) >= 3
    by_account = {each.device: each for each in accounting.accounts(coordinator.events())}
    assert "1 of 4096" in by_account[bad].quarantined


def test_a_device_where_leases_fail_alone_is_taken_out(tmp_path: Path) -> None:
    engine = Simulated(evidence=line, erring=lambda worker, order: worker == "w2")
    coordinator = ran(tmp_path, engine)
    assert list(coordinator.state.quarantined) == ["host/GPU-w2"]
    assert (coordinator.state.open, coordinator.state.broken) == (0, {})
    assert merged_lines(coordinator) == Counter(dict.fromkeys(coordinator.state.all, 1))


def test_a_test_that_fails_everywhere_is_an_error_of_the_judge(tmp_path: Path) -> None:
    engine = Simulated(erring=lambda worker, order: order.node == "test[k3-3]")
    coordinator = ran(tmp_path, engine)
    state = coordinator.state
    assert not state.quarantined
    assert {state.all[id_].unit.node for id_ in state.broken} == {"test[k3-3]"}
    coordinator.merged.conclude(SLUG, state)
    errors = (coordinator.merged.run(SLUG) / "errors.log").read_text()
    assert "no device" in errors
    assert "test[k3-3]" in errors


def test_others_learn_of_a_failure_at_once_and_do_not_shrink_it(tmp_path: Path) -> None:
    engine = Simulated(failing=lambda worker, order: order.node == "test[k0-0]")
    coordinator = ran(tmp_path, engine)
    orders = [order for _, order in engine.given if order.node == "test[k0-0]"]
    assert [order.shrinks for order in orders].count(True) == 1
    (told,) = [each for each in engine.told if each[1] == "known"]
    assert told[2] == "test[k0-0]"
    assert len(told[0]) == 2
    assert coordinator.failing == len(SEEDS)


def test_a_device_that_fails_a_test_first_is_checked_at_once(tmp_path: Path) -> None:
    """It breaks at its second lease, fails it, and does no third one."""
    engine = Simulated(
        evidence=line,
        wrong={"w1": 2},
        failing=lambda worker, order: (
            worker == "w1" and sum(who == "w1" for who, _ in engine.given) == 2
        ),
    )
    coordinator = ran(tmp_path, engine)
    assert sum(worker == "w1" for worker, _ in engine.given) == 2
    assert list(coordinator.state.quarantined) == ["host/GPU-w1"]
    assert coordinator.state.open == 0
    kept = [path.read_text() for path in coordinator.merged.run(SLUG).glob("device-*")]
    assert not any("fail" in text for text in kept)


def test_exit_first_believes_no_broken_device(tmp_path: Path) -> None:
    engine = Simulated(workers=1, wrong={"w0": 1}, failing=lambda worker, order: True)
    coordinator = ran(tmp_path, engine, plan(exit_first=True))
    assert list(coordinator.state.quarantined) == ["host/GPU-w0"]
    assert not list(coordinator.merged.run(SLUG).glob("device-*"))


def test_exit_first_stops_all(tmp_path: Path) -> None:
    engine = Simulated(failing=lambda worker, order: True, seconds=lambda draw: draw.uniform(1, 2))
    coordinator = ran(tmp_path, engine, plan(exit_first=True))
    assert coordinator.stopping
    assert len(engine.given) == 3
    assert engine.told[0][0] == ("w0", "w1", "w2")
    assert engine.told[0][1] == "stop"


def test_each_kind_of_device_gets_all_leases(tmp_path: Path) -> None:
    engine = Simulated(slugs={"w2": "nvidia-h200"}, evidence=line)
    coordinator = ran(tmp_path, engine)
    kinds = Counter(lease.kind for lease in coordinator.state.all.values())
    assert kinds == {SLUG: 24, "nvidia-h200": 24}
    assert coordinator.state.open == 0
    header = (coordinator.merged.run("nvidia-h200") / "campaign.jsonl").read_text()
    assert '"run":"c.nvidia-h200"' in header


def test_problems_drawn_are_counted_once(tmp_path: Path) -> None:
    engine = Simulated(dying=lambda worker, order: len(worker) < 3)
    coordinator = ran(tmp_path, engine)
    for _ in range(2):  # the second command finds the first one's
        coordinator.merged.conclude(SLUG, coordinator.state)
        (text,) = (coordinator.merged.run(SLUG) / "drawn.jsonl").read_text().splitlines()
        assert json.loads(text)["drawn"] == 2 * 24


class _KilledError(Exception):
    pass


@pytest.mark.parametrize("write", range(4, 81, 7))
def test_a_coordinator_that_dies_at_any_write_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: int
) -> None:
    """Of the journal or of evidence; the evidence that is there twice says the same."""
    count = 0
    real = os.write

    def dies(descriptor: int, data: bytes) -> int:
        nonlocal count
        count += 1
        if count == write:
            real(descriptor, data[: len(data) // 2])
            raise _KilledError
        return real(descriptor, data)

    first = begun(tmp_path, Simulated(evidence=line))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", dies)
        with pytest.raises(_KilledError):
            first.run()
    done_before = sum(isinstance(event, Done) for event in first.events())
    second = begun(tmp_path, Simulated(evidence=line))
    assert len(second.state.done) == done_before
    second.run()
    second.close()
    assert second.state.open == 0
    found: Counter[str] = Counter()
    for path in second.merged.run(SLUG).glob("device-*.jsonl"):
        for text in path.read_text().splitlines():
            if text.endswith("}"):  # the torn one aside
                found[json.loads(text)["lease"]] += 1
    assert set(found) == set(second.state.all)
    assert sum(found.values()) <= len(second.state.all) + 3  # those under way


def test_a_quarantine_outlives_the_coordinator(tmp_path: Path) -> None:
    engine = Simulated(evidence=line, wrong={"w1": 0})
    first = ran(tmp_path, engine)
    assert any(isinstance(event, Quarantined) for event in first.events())
    again = begun(tmp_path, Simulated())
    assert list(again.state.quarantined) == ["host/GPU-w1"]
    assert again.state.open == 0
    again.close()


def test_another_command_does_not_continue_it(tmp_path: Path) -> None:
    ran(tmp_path, Simulated())
    for other in (plan(seeds=(0, 1)), plan(sources="edited")):
        with pytest.raises(ContinuedError, match="other options"):
            begun(tmp_path, Simulated(), other)
    again = ran(tmp_path, engine := Simulated())
    assert (again.state.open, engine.given) == (0, [])


def test_a_slow_worker_does_not_hold_the_campaign_up(tmp_path: Path) -> None:
    engine = Simulated(
        workers=4, tests=units(40), slow={"w3": 5000.0}, seconds=lambda draw: 1.0, evidence=line
    )
    coordinator = ran(tmp_path, engine, plan(seeds=(0,)))
    assert coordinator.state.open == 0
    assert engine.now < 200
    assert any(len(each) > 1 for each in _holders(engine).values())


def _holders(engine: Simulated) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for worker, order in engine.given:
        found.setdefault(order.lease, []).append(worker)
    return found


def test_a_lost_engine_says_how_to_go_on(tmp_path: Path) -> None:
    class Lost(Simulated):
        def news(self, seconds: float):  # type: ignore[no-untyped-def]
            if len(self.given) > 6:
                raise EngineError("the scheduler at tcp://x does not answer")
            return super().news(seconds)

    coordinator = begun(tmp_path, Lost(evidence=line))
    with pytest.raises(EngineError):
        coordinator.run()
    coordinator.close()
    again = ran(tmp_path, Simulated(evidence=line))
    assert again.state.open == 0
    assert not sum(again.state.losses.values())  # a scheduler's end is no worker's fault
