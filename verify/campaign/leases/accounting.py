"""Accounting: what each device of a campaign did and how long it was at work, from the journal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from verify.campaign.leases.events import (
    Controlled,
    Done,
    Event,
    Failed,
    Joined,
    Left,
    Quarantined,
)


@dataclass(frozen=True)
class Account:
    """One device's.

    leases, cases, failing: done, judged in them, failing verdicts.  again: leases that another
    device had done first.  busy: seconds in leases.  present: seconds from each admission of a
    worker to its end, as far as the journal says when it ended.  lost: workers that were lost.
    failed: leases that could not be done, for a reason that is no verdict.
    """

    device: str
    kind: str = ""
    host: str = ""
    leases: int = 0
    again: int = 0
    cases: int = 0
    failing: int = 0
    busy: float = 0.0
    present: float = 0.0
    controls: int = 0
    failed: int = 0
    lost: int = 0
    quarantined: str = ""

    def data(self) -> dict[str, Any]:
        """JSON-ready, rounded to milliseconds."""
        return {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


def accounts(events: Iterable[Event]) -> list[Account]:
    """One per device that was admitted or quarantined, by kind and device."""
    found: dict[str, Account] = {}
    workers: dict[str, Joined] = {}
    done: set[str] = set()

    def change(device: str, **more: Any) -> None:
        account = found.setdefault(device, Account(device))
        changes: dict[str, Any] = {
            name: value if isinstance(value, str) else getattr(account, name) + value
            for name, value in more.items()
        }
        found[device] = replace(account, **changes)

    for event in events:
        match event:
            case Joined():
                workers[event.worker] = event
                change(event.device, kind=event.kind, host=event.host)
            case Left() if event.worker in workers:
                joined = workers.pop(event.worker)
                present = max(event.time - joined.time, 0.0) if event.time else 0.0
                change(joined.device, present=present, lost=int(event.lost))
            case Done():
                change(
                    event.device,
                    leases=int(event.lease not in done),
                    again=int(event.lease in done),
                    cases=event.cases if event.lease not in done else 0,
                    failing=event.failing,
                    busy=event.seconds,
                )
                done.add(event.lease)
            case Failed():
                change(event.device, failed=1)
            case Controlled():
                change(event.device, controls=1)
            case Quarantined():
                change(event.device, quarantined=event.reason)
            case _:
                pass
    return sorted(found.values(), key=lambda account: (account.kind, account.device))
