"""Leases: none is lost, none counts twice, and a journal makes the same state again, whatever order
workers come, go, work and fail in."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from verify.campaign.leases.events import Begun, Done, Event, Failed, Joined, Planned
from verify.campaign.leases.plan import Lease, Unit, leases
from verify.campaign.leases.state import MOST_FAILURES, MOST_LOSSES, STRIKES, Leases

KINDS = ("h100", "cpu")
UNITS = tuple(Unit(f"test[{n}]", n % 3 > 0, f"file{n % 2}", float(n == 4)) for n in range(5))
_READ = msgspec.json.Decoder(Event)


def begun(seeds: tuple[int, ...] = (0, 1)) -> tuple[Leases, list[bytes]]:
    journal: list[bytes] = []
    state = Leases(lambda event: journal.append(msgspec.json.encode(event)))
    first = Begun("asked", seeds, "now")
    state.emit(first)
    state.apply(first)
    return state, journal


def restored(journal: list[bytes]) -> Leases:
    again: list[bytes] = []
    state = Leases(lambda event: again.append(msgspec.json.encode(event)))
    for line in journal:
        state.apply(_READ.decode(line))
    return state


def told(state: Leases) -> tuple[object, ...]:
    """All that decides what comes next."""
    waiting = {
        (kind, family): list(ids)
        for kind, families in state.waiting.items()
        for family, ids in families.items()
        if ids
    }
    counts = [+each for each in (state.losses, state.attempts, state.unchecked, state.did)]
    marks = [
        {device: list(ids) for device, ids in found.items() if ids}
        for found in (state.suspects, state.strikes, state.failures)
    ]
    return (
        *(waiting, state.given, state.done, state.broken, state.workers, state.quarantined),
        *(state.seeds, state.units, state.sources, *counts, *marks),
    )


class Campaign(RuleBasedStateMachine):
    """Workers of two kinds on a few devices; the coordinator can die at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.journal = begun()
        self.names = 0
        self.has: dict[str, list[str]] = {}  # worker -> leases that it works on, even if it is lost
        self.device_of: dict[str, str] = {}
        self.did: list[tuple[str, str]] = []  # (lease, device) whose evidence was wanted

    @initialize()
    def both_kinds_are_planned(self) -> None:
        for kind in KINDS:
            assert self.state.plan(kind, UNITS, "sources") is None

    @rule(kind=st.sampled_from(KINDS), number=st.integers(0, 2))
    def arrives(self, kind: str, number: int) -> None:
        worker, device = f"w{self.names}", f"{kind}/{number}"
        self.names += 1
        taken = any(each.device == device for each in self.state.workers.values())
        refused = self.state.join(Joined(worker, kind, device))
        assert (refused is not None) == (taken or device in self.state.quarantined)
        if refused is None:
            self.has[worker] = []
            self.device_of[worker] = device

    @rule(data=st.data(), lost=st.booleans())
    def leaves(self, data: st.DataObject, lost: bool) -> None:
        if self.state.workers:
            worker = data.draw(st.sampled_from(sorted(self.state.workers)))
            self.state.leave(worker, lost=lost)
            assert worker not in self.state.workers

    @rule(data=st.data(), again=st.booleans())
    def asks(self, data: st.DataObject, again: bool) -> None:
        if self.state.workers:
            worker = data.draw(st.sampled_from(sorted(self.state.workers)))
            lease = (
                self.state.give_again(worker, lambda lease: True)
                if again
                else self.state.give(worker)
            )
            if lease is not None:
                assert lease.kind == self.state.workers[worker].kind
                assert not self.state.suspended(self.device_of[worker])
                self.has[worker].append(lease.id)

    def work(self, data: st.DataObject) -> tuple[str, str] | None:
        at = [(worker, lease) for worker, ids in self.has.items() for lease in ids]
        if not at:
            return None
        worker, lease = data.draw(st.sampled_from(at))
        self.has[worker].remove(lease)
        return worker, lease

    @rule(data=st.data())
    def finishes(self, data: st.DataObject) -> None:
        found = self.work(data)  # of a worker that is thought lost, too
        if found is not None:
            worker, lease = found
            device = self.device_of[worker]
            if self.state.finish(Done(lease, worker, device, 1.0)):
                self.did.append((lease, device))
                assert device not in self.state.quarantined

    @rule(data=st.data())
    def fails(self, data: st.DataObject) -> None:
        found = self.work(data)
        if found is not None:
            worker, lease = found
            self.state.fail(Failed(lease, worker, self.device_of[worker], "no device"))

    @rule(data=st.data())
    def gives_back(self, data: st.DataObject) -> None:
        found = self.work(data)
        if found is not None:
            self.state.take_back(found[1], found[0])

    @rule(kind=st.sampled_from(KINDS), number=st.integers(0, 2))
    def is_found_wrong(self, kind: str, number: int) -> None:
        device = f"{kind}/{number}"
        self.state.quarantine(device, "the control problem is wrong")
        assert all(done.device != device for done in self.state.done.values())

    @rule(torn=st.booleans())
    def the_coordinator_dies(self, torn: bool) -> None:
        """With every worker; torn: the last line, which says what has not been acted on."""
        before = told(self.state)
        journal = self.journal
        self.state = restored(journal)
        assert told(self.state) == before
        self.state.emit = lambda event: journal.append(msgspec.json.encode(event))
        for worker in list(self.state.workers):
            self.state.leave(worker)
        assert not self.state.given

    @invariant()
    def every_lease_has_one_place(self) -> None:
        state = self.state
        waiting = [
            id_ for families in state.waiting.values() for ids in families.values() for id_ in ids
        ]
        places = Counter([*waiting, *state.given, *state.done, *state.broken])
        assert places == Counter(dict.fromkeys(state.all, 1))
        assert state.open == len(waiting) + len(state.given)

    @invariant()
    def what_counts_was_done(self) -> None:
        for lease, done in self.state.done.items():
            assert (lease, done.device) in self.did
            assert done.device not in self.state.quarantined

    @invariant()
    def holders_are_at_work(self) -> None:
        for lease, holders in self.state.given.items():
            assert 1 <= len(holders) <= 2
            assert len(set(holders)) == len(holders)
            for worker in holders:
                assert self.state.workers[worker].kind == self.state.all[lease].kind
        for worker in self.state.workers:
            assert self.state.workers[worker].device not in self.state.quarantined

    def teardown(self) -> None:
        """With one more good device a kind, the campaign always comes to its end."""
        for worker in list(self.state.workers):
            self.state.leave(worker, lost=False)
        for kind in KINDS if self.state.all else ():
            worker = f"last-{kind}"
            assert self.state.join(Joined(worker, kind, f"{kind}/good")) is None
            while (lease := self.state.give(worker)) is not None:
                assert self.state.finish(Done(lease.id, worker, f"{kind}/good", 1.0))
                self.did.append((lease.id, f"{kind}/good"))
        assert self.state.open == 0
        self.every_lease_has_one_place()


Campaign.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
test_whatever_happens = Campaign.TestCase


def planned(*devices: str, seeds: tuple[int, ...] = (0,), units: int = 5) -> Leases:
    """One kind of device, with a worker on each of these."""
    state, _ = begun(seeds)
    state.plan("h100", UNITS[:units], "sources")
    for device in devices:
        assert state.join(Joined(f"on-{device}", "h100", device)) is None
    return state


def given(state: Leases, device: str) -> Lease:
    lease = state.give(f"on-{device}")
    assert lease is not None
    return lease


def failed(state: Leases, device: str, lease: Lease) -> None:
    state.fail(Failed(lease.id, f"on-{device}", device, "no kernel image", "test", "variant"))


def done(state: Leases, device: str, lease: Lease) -> bool:
    return state.finish(Done(lease.id, f"on-{device}", device, 1.0))


def test_seeds_multiply_what_they_change() -> None:
    found = leases("h100", UNITS, (7, 8))
    assert [(lease.unit.node, lease.seed) for lease in found] == [
        ("test[4]", 7),  # the long one first
        ("test[0]", 7),
        ("test[1]", 7),
        ("test[2]", 7),
        ("test[3]", 7),
        ("test[4]", 8),
        ("test[1]", 8),
        ("test[2]", 8),
    ]
    assert len({lease.id for lease in found}) == len(found)
    assert found[0].id == leases("h100", UNITS[::-1], (7,))[0].id != leases("cpu", UNITS, (7,))[0]


def test_a_worker_keeps_to_its_kernel_file() -> None:
    state = planned("a", "b", seeds=(0, 1, 2))
    families = {device: [given(state, device).unit.family for _ in range(3)] for device in "ab"}
    assert {device: len(set(found)) for device, found in families.items()} == {"a": 1, "b": 1}
    assert families["a"][0] != families["b"][0]


def test_a_device_that_fails_alone_is_quarantined_and_what_it_did_is_done_again() -> None:
    state = planned("bad", "good", seeds=(0, 1))
    first = given(state, "bad")
    assert done(state, "bad", first)
    for _ in range(STRIKES):
        failed(state, "bad", given(state, "bad"))
    assert state.give("on-bad") is None  # it waits for others to try
    assert not state.quarantined
    for _ in range(STRIKES):
        assert done(state, "good", given(state, "good"))
    assert list(state.quarantined) == ["bad"]
    assert "done elsewhere" in state.quarantined["bad"]
    assert first.id not in state.done
    assert "is quarantined" in str(state.join(Joined("again", "h100", "bad")))
    assert not done(state, "bad", first)  # and no late result of it counts
    while (lease := state.give("on-good")) is not None:
        assert done(state, "good", lease)
    assert state.open == 0
    assert first.id in state.done


def test_a_lease_that_fails_everywhere_is_broken_and_no_device_is_blamed() -> None:
    state = planned("a", "b", units=1)
    lease = given(state, "a")
    failed(state, "a", lease)
    assert state.give("on-a") is None  # the other one is to try
    failed(state, "b", given(state, "b"))
    failed(state, "a", given(state, "a"))
    assert state.attempts[lease.id] == MOST_FAILURES
    assert state.broken == {lease.id: "no kernel image"}
    assert not state.quarantined
    assert not any(state.strikes.values())


def test_a_rare_failure_of_a_device_that_did_much_is_no_reason() -> None:
    state = planned("flaky", "good", seeds=tuple(range(60)))
    for _ in range(STRIKES):
        for _ in range(21):
            assert done(state, "flaky", given(state, "flaky"))
        lease = given(state, "flaky")
        failed(state, "flaky", lease)
        assert done(state, "good", given(state, "good"))
    assert len(state.strikes["flaky"]) == STRIKES
    assert not state.quarantined


def test_a_lease_that_takes_its_workers_with_it_is_broken() -> None:
    state = planned(units=1)
    for n in range(MOST_LOSSES):
        assert state.join(Joined(f"on-{n}", "h100", str(n))) is None
        lease = given(state, str(n))
        state.leave(f"on-{n}")
    assert state.broken == {lease.id: f"{MOST_LOSSES} workers were lost with it"}


def test_workers_that_differ_are_refused() -> None:
    state = planned("a")
    assert "other sources" in str(state.plan("h100", UNITS, "edited"))
    assert "other tests" in str(state.plan("h100", UNITS[:-1], "sources"))
    assert "has a already" in str(state.join(Joined("second", "h100", "a")))
    assert state.plan("h100", UNITS[::-1], "sources") is None


def test_a_slow_lease_is_given_again_once_and_counts_once() -> None:
    state = planned("a", "b", "c", units=1)
    lease = given(state, "a")
    assert state.give("on-b") is None
    assert state.give_again("on-b", lambda id_: False) is None
    assert state.give_again("on-b", lambda id_: True) == lease
    assert state.give_again("on-c", lambda id_: True) is None
    assert done(state, "b", lease)
    assert done(state, "a", lease)  # evidence all the same
    assert state.done[lease.id].device == "b"


@pytest.mark.parametrize("end", ["leaves", "fails", "gives back"])
def test_a_lease_that_is_done_waits_no_more(end: str) -> None:
    """Whatever becomes of the slower one of two workers that had it."""
    state = planned("a", "b", units=1)
    lease = given(state, "a")
    assert state.give_again("on-b", lambda id_: True) == lease
    assert done(state, "b", lease)
    if end == "leaves":
        state.leave("on-a")
    elif end == "fails":
        failed(state, "a", lease)
    else:
        state.take_back(lease.id, "on-a")
    assert state.give("on-b") is None
    assert (state.open, list(state.done), state.given) == (0, [lease.id], {})


@pytest.mark.parametrize("event", [Planned("h100", UNITS, "s"), Done("l", "w", "d", 1.5)])
def test_events_are_read_as_they_are_written(event: Event) -> None:
    assert _READ.decode(msgspec.json.encode(event)) == event
