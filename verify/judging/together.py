"""Together: launches of one case that are known beforehand are asked for by one message.

Each message costs the judge and the kernel process a switch of processes, and on a GPU a wait for
the device, which many processes share.  An oracle that compares launches names them
(`Oracle.launches`).  They run one after another, in the order in which they would run alone, each
at the same addresses and over its own inputs, redzones and poison: before each launch the kernel
process copies these from their place in the arena to where a launch alone has them (on a GPU: to
the device), and back after it.  The judge reads the outputs of each, and looks for its damage.

All are of one case: a message never holds the buffers of two.  If it fails in any way (a refusal,
an exception, a crash, a hang, an error of the device), nothing that it did counts.  The launches
are then made again in a fresh process, one message each, so that a failure is the failure of its
own launch, with a deadline of its own.  If all of them succeed then, the failure is an aftermath.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from verify.cell.arena import Plan
from verify.cell.process import Reply
from verify.judging.history import Before
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.problem.inputs import Inputs

_MOST = 8  # launches of one message
_LARGEST = 32 << 20  # bytes of their buffers: larger launches take longer than a message
_HARMLESS = ("unsupported", "breach")  # what leaves a process as it was
_PAGE = 4096  # the unit in which the arena is shared out


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
    """Make launches of trials of one case ahead, as far as that is possible; `Trial.run` and
    `Trial.saved` make the others when they are asked."""
    open_ones: dict[tuple[int, str], Wanted] = {}
    for each in wanted:
        if each.tag not in each.trial.launches:
            open_ones.setdefault((id(each.trial), each.tag), each)
    trials = {id(each.trial): each.trial for each in open_ones.values()}.values()
    backward = [trial for trial in trials if trial.entry == "backward"]
    if any(trial.refuses for trial in trials):
        return
    _launch([Wanted(t, "saved") for t in backward if not (t.own_softmax or "saved" in t.launches)])
    # A backward gets what its forward saved, if that is good.
    if any(not trial.saved.reply.ok or trial.saved.damage for trial in backward):
        return
    _launch(list(open_ones.values()))


def _launch(wanted: Sequence[Wanted]) -> None:
    """Launch what fits into one message; nothing if that is one launch."""
    plans: list[tuple[Wanted, Plan]] = []
    for each in wanted[:_MOST]:
        where = each.trial.plan(each.entry)
        if not isinstance(where, Plan):
            break
        plans.append((each, where))
    # At the begin of the arena, each launch has its buffers while it runs.
    end = _up(max((where.size for _, where in plans), default=0))
    chosen: list[tuple[Wanted, Plan, int]] = []
    for each, where in plans:
        if end + where.size > _LARGEST:
            break
        chosen.append((each, where, end))
        end = _up(end + where.size)
    if len(chosen) < 2:
        return
    trial = chosen[0][0].trial
    if not trial.cell.runs_several(trial.declaration.name):
        return
    with trial.clock.timed("generate"):
        trial.arena.reserve(end)
        for each, where, begin in chosen:
            trial.arena.lay(where, each.given, each.poison, begin)
    requests = [
        each.trial.request(each.entry, where) | {"begin": begin} for each, where, begin in chosen
    ]
    replies: list[Reply] = []

    def ask() -> Reply:
        reply, found = trial.cell.run_several(trial.declaration.path, requests, trial.arena)
        replies.extend(found)
        return reply

    with trial.clock.timed("run"):
        reply, failure = trial.hearing.ask_several(trial.cell, ask)
        for (each, where, begin), own in zip(chosen, replies, strict=False):
            each.trial.launches[each.tag] = each.trial.read(where, own, each.poison, begin)
    if reply.ok:
        return
    fresh = reply.status not in _HARMLESS
    if fresh:
        trial.cell.restart()
    if all(each.alone().reply.ok for each, _, _ in chosen):
        trial.hearing.aftermaths.append(failure)
    elif fresh:
        trial.hearing.before = Before()  # it fails alone


def _up(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
