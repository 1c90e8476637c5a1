"""Together: launches that are known beforehand are asked for by one message.

Each message costs the judge and the kernel process a switch of processes, and on a GPU a wait for
the device, which many processes share.  An oracle that compares launches names them
(`Oracle.launches`), and of cases that are judged one after another the first launches are known.
They run one after another, in the order in which they would run alone, each at the same addresses
and over its own inputs, redzones and poison: before each launch the kernel process copies these
from their place in the arena to where a launch alone has them (on a GPU: to the device), and back
after it.  The judge reads the outputs of each, and looks for its damage.

If a message fails in any way (a refusal, an exception, a crash, a hang, an error of the device),
nothing that it did counts.  The launches are then made again in a fresh process, one message each,
so that a failure is the failure of its own launch and case, with a deadline of its own.  If all of
them succeed then, the failure is an aftermath.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from verify.cell.arena import Plan
from verify.cell.arena_runs import Runs
from verify.cell.process import Reply
from verify.judging.history import Hearing, ask_several
from verify.judging.launch import Launch, read
from verify.judging.trial import Trial
from verify.judging.truth import Clock
from verify.problem.inputs import Inputs

_MOST = 64  # launches of one message
_LARGEST = 32 << 20  # bytes of their buffers: larger launches take longer than a message
_HARMLESS = ("unsupported", "breach")  # what leaves a process as it was
_PAGE = 4096  # the unit in which the arena is shared out
_WELL = Reply("ok")


@dataclass(frozen=True)
class Wanted:
    """A launch that an oracle is going to ask `Trial.run` for; "saved": the forward of a
    backward."""

    trial: Trial
    tag: str = "first"
    poison: str = "nan"
    inputs: Inputs | None = None

    @property
    def entry(self) -> str:
        """The entry point that is launched."""
        return "saved" if self.tag == "saved" else self.trial.entry

    @property
    def given(self) -> Mapping[str, Tensor]:
        """What the launch gets, by the name of its buffer."""
        return self.trial.inputs.named if self.tag == "saved" else self.trial.given(self.inputs)

    def alone(self) -> Launch:
        """Launch it by a message of its own."""
        if self.tag == "saved":
            return self.trial.saved
        return self.trial.run(self.tag, poison=self.poison, inputs=self.inputs)


def first_of(*others: Callable[[Trial], Trial]) -> Callable[[Trial], tuple[Wanted, ...]]:
    """An oracle's `launches`: the first of each trial beside the case's that `others` make, each of
    which always returns the same one."""
    return lambda trial: tuple(Wanted(other(trial)) for other in others)


def launch(wanted: Iterable[Wanted]) -> None:
    """Make launches of one cell's trials ahead, as far as that is possible; `Trial.run` and
    `Trial.saved` make the others when they are asked."""
    open_ones: dict[tuple[int, str], Wanted] = {}
    for each in wanted:
        if each.tag not in each.trial.launches and not each.trial.refuses:
            open_ones.setdefault((id(each.trial), each.tag), each)
    if len(open_ones) < 2:
        return
    trials = {id(each.trial): each.trial for each in open_ones.values()}
    backward = [trial for trial in trials.values() if trial.entry == "backward"]
    saved = [Wanted(t, "saved") for t in backward if not (t.own_softmax or "saved" in t.launches)]
    if not _launch(saved):
        return
    # A backward gets what its forward saved, if that is good.
    bad = {id(t) for t in backward if not t.saved.reply.ok or t.saved.damage}
    _launch([each for (of, _), each in open_ones.items() if of not in bad])


def _launch(wanted: Sequence[Wanted]) -> bool:
    """Launch by messages of several launches each, and leave out what would be alone in one;
    returns whether all is well so far."""
    plans: list[tuple[Wanted, Plan]] = []
    for each in wanted:
        where = each.trial.plan(each.entry)
        if not isinstance(where, Plan):
            break
        plans.append((each, where))
    while plans:
        chosen = _fitting(plans)
        if len(chosen) > 1 and not _sent(chosen):
            return False
        plans = plans[max(len(chosen), 1) :]
    return True


def _fitting(plans: Sequence[tuple[Wanted, Plan]]) -> list[tuple[Wanted, Plan, int]]:
    """The first of these that fit into one message, each with the byte of the arena at which its
    buffers begin."""
    plans = plans[:_MOST]
    # At the begin of the arena, each launch has its buffers while it runs.
    end = _up(max(where.size for _, where in plans))
    chosen: list[tuple[Wanted, Plan, int]] = []
    for each, where in plans:
        if end + where.size > _LARGEST:
            break
        chosen.append((each, where, end))
        end = _up(end + where.size)
    return chosen


def _sent(chosen: Sequence[tuple[Wanted, Plan, int]]) -> bool:
    """Send one message; returns whether its reply is good."""
    trials = [each.trial for each, _, _ in chosen]
    trial, cell = trials[0], trials[0].cell
    if not cell.runs_several(trial.declaration.name):
        return False
    hearings: dict[int, Hearing] = {id(w.trial.hearing): w.trial.hearing for w, _, _ in chosen}
    with shared(trials, "generate"):
        runs = _runs(chosen)
        trial.arena.reserve(max(own.begin + own.count * own.step for own, _ in runs))
        for own, those in runs:
            own.lay([each.given for each in those], [each.poison for each in those])
    requests = [
        each.trial.request(each.entry, where) | {"begin": begin} for each, where, begin in chosen
    ]
    replies: list[Reply] = []

    def ask() -> Reply:
        reply, found = cell.run_several(trial.declaration.path, requests, trial.arena)
        replies.extend(found)
        return reply

    with shared(trials, "run"):
        reply, failure = ask_several(list(hearings.values()), cell, ask)
        found = [made for own, those in runs for made in _read(own, those)] if replies else []
        for (each, _, _), own_reply, made in zip(chosen, replies, found, strict=False):
            each.trial.launches[each.tag] = replace(made, reply=own_reply)
    if reply.ok:
        return True
    if reply.status not in _HARMLESS:
        cell.restart()
        for hearing in hearings.values():
            hearing.begin_again()
    if all(each.alone().reply.ok for each, _, _ in chosen):
        trial.hearing.aftermaths.append(failure)
    return False


def _runs(chosen: Sequence[tuple[Wanted, Plan, int]]) -> list[tuple[Runs, list[Wanted]]]:
    """The launches of a message, those of one plan that follow each other together."""
    found: list[tuple[Runs, list[Wanted]]] = []
    for each, where, begin in chosen:
        if found and found[-1][0].where == where:
            found[-1][0].count += 1
            found[-1][1].append(each)
        else:
            arena = each.trial.arena
            found.append((Runs(arena, where, begin, _up(where.size), 1), [each]))
    return found


def _read(runs: Runs, those: Sequence[Wanted]) -> list[Launch]:
    """The launches of these runs, as if all had ended well."""
    return read(runs, [_WELL] * len(those), [each.poison for each in those])


@contextlib.contextmanager
def shared(trials: Sequence[Trial], step: str) -> Iterator[None]:
    """Count the time of the block for that step, an equal part for each of these trials."""
    clock = Clock()
    try:
        with clock.timed(step):
            yield
    finally:
        for trial in trials:
            trial.clock.share(clock, 1 / len(trials))


def _up(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
