"""Short trials: which config of a variant is timed first, and alone under `--best`.

A suite has thousands of rows, and most readers want the fastest config of each variant. So the
configs of a variant are tried before, a few calls each, on one workload of each direction, head
dim, mask and number of heads in all. Only configs with passing verdicts are candidates: a fast
wrong one is never chosen.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from verify.timing.record import Benchmark, Trial, best_config, shape_of
from verify.timing.session import INTERRUPTED, Candidate, Session
from verify.timing.workloads import Workload

_LENGTH = 4096  # of a trial, or what is nearest: long enough that the loop over keys decides


def tried(
    session: Session,
    candidates: Sequence[Candidate],
    last: Benchmark | None,
    seconds: float | None = None,
) -> list[Trial]:
    """The trials of variants with several configs: those of the last record where the source is the
    same, and the others now.  Ctrl-C stops the session, and a stopped one makes no trials.

    seconds: for all of them, None without a limit; a variant that is not tried begins with its
    first config.
    """
    begun = time.monotonic()
    known = {_key(one): one for one in (last.get("trials", ()) if last else ())}
    found: list[Trial] = []
    for group in _groups(candidates):
        first = group[0]
        made: Trial = {
            "variant": first.declaration.ref,
            "source_hash": first.declaration.source_hash,
            "dtype": first.dtype,
            "workload": shape_of(first.workload),
            "seconds": {},
        }
        if _key(made) in known:
            found.append(known[_key(made)])
            continue
        for candidate in group:
            if session.stopped or (seconds is not None and time.monotonic() - begun > seconds):
                return found
            try:
                took = session.trial(candidate)
            except KeyboardInterrupt:
                session.stopped = INTERRUPTED
                return found
            if took is not None:
                made["seconds"][candidate.config.name] = took
        if made["seconds"]:
            found.append(made)
    return found


def _key(one: Trial) -> tuple[object, ...]:
    return one["variant"], one["source_hash"], one["dtype"], tuple(one["workload"].items())


def _groups(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """The configs of each variant and kind of workload on one of these workloads, where there are
    several, in the order in which they are timed."""
    kinds: dict[tuple[object, ...], dict[Workload, list[Candidate]]] = {}
    for one in candidates:
        kind = (one.declaration.ref, one.dtype, *one.workload.kind, one.workload.heads_in_all)
        kinds.setdefault(kind, {}).setdefault(one.workload, []).append(one)
    places = (of_workload[min(of_workload, key=_distance)] for of_workload in kinds.values())
    return [group for group in places if len(group) > 1]


def _distance(workload: Workload) -> float:
    return max(workload.seqlen, _LENGTH) / min(workload.seqlen, _LENGTH)


def ordered(
    candidates: Sequence[Candidate], record: Benchmark | None, *, only_best: bool = False
) -> list[Candidate]:
    """The candidates, at the first place of each variant and workload the config that the record
    found fastest; the places of the others stay.

    only_best: without the others.
    """
    groups: dict[tuple[str, str, Workload], list[int]] = {}
    for place, one in enumerate(candidates):
        groups.setdefault((one.declaration.ref, one.dtype, one.workload), []).append(place)
    found = list(candidates)
    dropped: set[int] = set()
    for (variant, dtype, workload), places in groups.items():
        name = best_config(record, variant, dtype, workload)
        mine = sorted(
            (candidates[place] for place in places), key=lambda one: one.config.name != name
        )
        for place, one in zip(places, mine, strict=True):
            found[place] = one
        dropped.update(places[1:] if only_best else ())
    return [one for place, one in enumerate(found) if place not in dropped]
