"""The state of a campaign's leases: who has what, what is done, and what is given next.

Pure: no clock, no file, no network.  `apply` takes one event and changes the state; every decision
becomes an event first, which `emit` hands to the journal.  So a state that is made again from its
journal is the state that was.

A lease is waiting, given (to one worker, or to two where one is slow), done or broken.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from verify.campaign.leases.events import (
    Begun,
    Broken,
    Controlled,
    Done,
    Event,
    Failed,
    Given,
    Joined,
    Left,
    Planned,
    Quarantined,
    Refused,
    Returned,
)
from verify.campaign.leases.plan import Lease, Unit, digest, leases

MOST_LOSSES = 5
"""A lease that so many workers were lost with is broken: it may be what kills them."""
MOST_FAILURES = 3
"""A lease that failed so often is broken."""
STRIKES = 3
"""A device that failed so many leases that no other device has tried waits until one has.  It is
quarantined after so many leases that failed there and were done elsewhere."""
_RARE = 20  # unless it did so many times more
_AT_ONCE = 2  # workers that can have a lease at the same time


@dataclass
class Leases:
    """emit: gets every event that is decided here, before it is applied."""

    emit: Callable[[Event], None] = lambda event: None
    seeds: tuple[int, ...] = ()
    asked: str = ""
    all: dict[str, Lease] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # by kind
    units: dict[str, str] = field(default_factory=dict)  # by kind: the digest of the plan
    waiting: dict[str, dict[str, dict[str, None]]] = field(default_factory=dict)
    """Ids by kind and family, in the order of the plan."""
    given: dict[str, list[str]] = field(default_factory=dict)  # lease -> workers
    done: dict[str, Done] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    workers: dict[str, Joined] = field(default_factory=dict)
    quarantined: dict[str, str] = field(default_factory=dict)  # device -> reason
    losses: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)  # that failed, by lease
    failures: dict[str, dict[str, Failed]] = field(default_factory=dict)  # lease -> device -> last
    suspects: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    """By device, the open leases that failed there and nowhere else."""
    strikes: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    """By device, the leases that failed there and were done elsewhere."""
    did: Counter[str] = field(default_factory=Counter)  # leases, by device
    unchecked: Counter[str] = field(default_factory=Counter)  # leases since a device's control
    _family: dict[str, str] = field(default_factory=dict)  # of a worker's last lease
    _busy: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))

    # Decisions

    def plan(self, kind: str, units: Iterable[Unit], sources: str) -> str | None:
        """Plan the leases of a kind of device; returns why a worker with other units or sources is
        refused, or None."""
        units = tuple(units)
        if kind not in self.units:
            self._say(Planned(kind, units, sources))
            return None
        if sources != self.sources[kind]:
            return "its kernels have other sources than those of the workers of its kind"
        if digest(units) != self.units[kind]:
            return "it would be asked other tests than the workers of its kind"
        return None

    def join(self, worker: Joined) -> str | None:
        """Admit a worker of a planned kind; returns why it is refused, or None."""
        why = self.quarantined.get(worker.device)
        if why is not None:
            return f"{worker.device} is quarantined: {why}"
        same = [each for each in self.workers.values() if each.device == worker.device]
        if same:
            return f"worker {same[0].worker} has {worker.device} already"
        self._say(worker)
        return None

    def refuse(self, worker: str, reason: str) -> None:
        """Record that a worker was not admitted."""
        self._say(Refused(worker, reason))

    def leave(self, worker: str, *, lost: bool = True, time: float = 0.0) -> None:
        """A worker is gone: what it had is given again."""
        if worker not in self.workers:
            return
        had = list(self._busy.get(worker, ()))
        self._say(Left(worker, lost, time))
        for lease in had:
            if self.losses[lease] >= MOST_LOSSES and lease in self.all and self._open(lease):
                self._say(Broken(lease, f"{self.losses[lease]} workers were lost with it"))

    def give(self, worker: str) -> Lease | None:
        """Give a worker its next lease; None if none waits that it may have."""
        joined = self.workers[worker]
        lease = self._next(joined)
        if lease is None:
            return None
        self._say(Given(lease.id, worker))
        return lease

    def give_again(self, worker: str, slow: Callable[[str], bool]) -> Lease | None:
        """Give an idle worker a lease that another one has and is slow with, if no lease waits."""
        joined = self.workers[worker]
        for id_, holders in self.given.items():
            lease = self.all[id_]
            if (
                lease.kind == joined.kind
                and len(holders) < _AT_ONCE
                and worker not in holders
                and joined.device not in self.failures.get(id_, ())
                and slow(id_)
            ):
                self._say(Given(id_, worker))
                return lease
        return None

    def finish(self, done: Done) -> bool:
        """A worker has done a lease; returns whether its evidence is wanted.

        It is not if the device is quarantined or the lease is none of this campaign.  Of two
        workers that did the same lease, the first counts; the second's verdicts are evidence, too.
        """
        if done.device in self.quarantined or done.lease not in self.all:
            return False
        failed_on = [d for d in self.failures.get(done.lease, ()) if d != done.device]
        self._say(done)
        for device in failed_on:
            count = len(self.strikes[device])
            if count >= STRIKES and count * _RARE >= self.did[device]:
                self.quarantine(device, f"{count} leases failed there and were done elsewhere")
        return True

    def fail(self, failed: Failed) -> None:
        """A worker could not do a lease: another device gets it, if there is one."""
        lease = self.all.get(failed.lease)
        if lease is None or failed.device in self.quarantined:
            return
        self._say(failed)
        if self._open(lease.id) and self.attempts[lease.id] >= MOST_FAILURES:
            self._say(Broken(lease.id, failed.message))

    def take_back(self, lease: str, worker: str) -> None:
        """A worker gave a lease back unfinished."""
        if lease in self._busy.get(worker, ()):
            self._say(Returned(lease, worker))

    def right(self, device: str, seconds: float) -> None:
        """The control problem was right on a device."""
        self._say(Controlled(device, seconds))

    def quarantine(self, device: str, reason: str) -> None:
        """Give a device nothing more, and give again all that it did."""
        if device not in self.quarantined:
            self._say(Quarantined(device, reason))

    # Questions

    @property
    def open(self) -> int:
        """Leases that are neither done nor broken."""
        return len(self.all) - len(self.done) - len(self.broken)

    def held(self, worker: str) -> tuple[str, ...]:
        """The leases that a worker has."""
        return tuple(self._busy.get(worker, ()))

    def idle(self, worker: str) -> bool:
        """Whether a worker has no lease."""
        return not self._busy.get(worker)

    def suspended(self, device: str) -> bool:
        """Whether a device waits until others have tried what failed there."""
        return len(self.suspects.get(device, ())) >= STRIKES and self._others(device)

    def waits(self, kind: str) -> bool:
        """Whether a lease of this kind waits."""
        return any(self.waiting.get(kind, {}).values())

    # Events

    def apply(self, event: Event) -> None:
        """Change the state by one event, new or from a journal."""
        meaning = {
            Begun: self._begin,
            Planned: self._plan,
            Joined: self._join,
            Left: self._leave,
            Given: self._give,
            Done: self._finish,
            Failed: self._fail,
            Returned: self._return,
            Broken: self._break,
            Controlled: self._control,
            Quarantined: self._quarantine,
        }.get(type(event))
        if meaning is not None:  # nothing follows from a refusal
            meaning(event)  # type: ignore[operator]

    def _say(self, event: Event) -> None:
        self.emit(event)
        self.apply(event)

    def _open(self, lease: str) -> bool:
        return lease not in self.done and lease not in self.broken

    def _begin(self, event: Begun) -> None:
        self.seeds = event.seeds
        self.asked = event.asked

    def _join(self, event: Joined) -> None:
        self.workers[event.worker] = event

    def _leave(self, event: Left) -> None:
        for lease in self._busy.pop(event.worker, {}):
            self.losses[lease] += event.lost
            self._no_longer(lease, event.worker)
        self.workers.pop(event.worker, None)
        self._family.pop(event.worker, None)

    def _return(self, event: Returned) -> None:
        self._no_longer(event.lease, event.worker)

    def _break(self, event: Broken) -> None:
        self._out_of_waiting(self.all[event.lease])
        self.given.pop(event.lease, None)
        for suspected in self.suspects.values():
            suspected.pop(event.lease, None)
        self.broken[event.lease] = event.message

    def _control(self, event: Controlled) -> None:
        self.unchecked.pop(event.device, None)

    def _plan(self, event: Planned) -> None:
        self.units[event.kind] = digest(event.units)
        self.sources[event.kind] = event.sources
        for lease in leases(event.kind, event.units, self.seeds):
            self.all[lease.id] = lease
            self._wait(lease)

    def _wait(self, lease: Lease, *, first: bool = False) -> None:
        families = self.waiting.setdefault(lease.kind, {})
        ids = families.setdefault(lease.unit.family, {})
        families[lease.unit.family] = {lease.id: None} | ids if first else ids
        families[lease.unit.family][lease.id] = None

    def _out_of_waiting(self, lease: Lease) -> None:
        self.waiting.get(lease.kind, {}).get(lease.unit.family, {}).pop(lease.id, None)

    def _next(self, worker: Joined) -> Lease | None:
        """One that failed elsewhere alone; else of the family of the worker's last lease; else of
        the family of which most wait for each worker that is at it."""
        if self.suspended(worker.device):
            return None
        families = self.waiting.get(worker.kind, {})
        for device, suspected in self.suspects.items():
            for lease in (self.all[id_] for id_ in suspected) if device != worker.device else ():
                if lease.kind == worker.kind and lease.id not in self.given:
                    return lease
        last = self._family.get(worker.worker)
        at = Counter(self._family.values())
        order = sorted(
            (name for name, ids in families.items() if ids),
            key=lambda name: (name != last, -len(families[name]) / (1 + at[name])),
        )
        for name in order:
            for id_ in families[name]:
                tried = self.failures.get(id_, ())
                if worker.device not in tried or not self._others(worker.device, tried):
                    return self.all[id_]
        return None

    def _others(self, device: str, but: Iterable[str] = ()) -> bool:
        """Whether a worker of the same kind has another device, which is none of `but`."""
        kinds = {each.kind for each in self.workers.values() if each.device == device}
        return any(
            each.kind in kinds and each.device != device and each.device not in but
            for each in self.workers.values()
        )

    def _give(self, event: Given) -> None:
        lease = self.all[event.lease]
        self._out_of_waiting(lease)
        self.given.setdefault(lease.id, []).append(event.worker)
        self._busy[event.worker][lease.id] = None
        self._family[event.worker] = lease.unit.family

    def _no_longer(self, lease: str, worker: str) -> None:
        """A worker has this lease no longer; it waits again if no other has it and it is open."""
        self._busy.get(worker, {}).pop(lease, None)
        holders = self.given.get(lease, [])
        if worker in holders:
            holders.remove(worker)
        if not holders:
            self.given.pop(lease, None)
            if self._open(lease):
                self._wait(self.all[lease], first=True)

    def _finish(self, event: Done) -> None:
        self._busy.get(event.worker, {}).pop(event.lease, None)
        self.unchecked[event.device] += 1
        self.did[event.device] += 1
        for device in self.failures.pop(event.lease, {}):
            self.suspects[device].pop(event.lease, None)
            if device != event.device:
                self.strikes[device][event.lease] = None
        if event.lease in self.done:
            return
        self.broken.pop(event.lease, None)  # one that was given up is done after all
        self._out_of_waiting(self.all[event.lease])
        self.given.pop(event.lease, None)
        self.done[event.lease] = event

    def _fail(self, event: Failed) -> None:
        failures = self.failures.setdefault(event.lease, {})
        failures[event.device] = event
        self.attempts[event.lease] += 1
        for device in failures:  # failing on several, it is the lease rather than the devices
            self.suspects[device].pop(event.lease, None)
        if len(failures) == 1 and self._open(event.lease):
            self.suspects[event.device][event.lease] = None
        self._no_longer(event.lease, event.worker)

    def _quarantine(self, event: Quarantined) -> None:
        self.quarantined[event.device] = event.reason
        self.unchecked.pop(event.device, None)
        for worker in [w for w, each in self.workers.items() if each.device == event.device]:
            for lease in list(self._busy[worker]):
                self._no_longer(lease, worker)
            del self.workers[worker]
            self._busy.pop(worker, None)
            self._family.pop(worker, None)
        for id_, done in list(self.done.items()):
            if done.device == event.device:
                del self.done[id_]
                self._wait(self.all[id_], first=True)
        self.suspects.pop(event.device, None)
        for failures in self.failures.values():
            failures.pop(event.device, None)
