"""Which oracles convict a run of a CuTe kernel on the CPU."""

from __future__ import annotations

import faulthandler
import multiprocessing
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection

from tests.harness.cute_host import HostError
from verify.judging.trial import Trial
from verify.oracles import Oracle, bound, empty_rows, poison

FORWARD: tuple[Oracle, ...] = (bound.FORWARD, empty_rows.ORACLE, poison.FORWARD)
BACKWARD: tuple[Oracle, ...] = (bound.BACKWARD, poison.BACKWARD)
MEMORY = "memory"  # the run writes where it must not, or its threads part
EXECUTION = "execution"  # the process dies of it, or comes to no end
_SECONDS = 5  # of CPU time for a case that takes a fraction of one
_FORK = multiprocessing.get_context("fork")


def convicting(trial: Trial) -> tuple[str, ...]:
    """The oracles that convict the trial, or MEMORY alone."""
    oracles = FORWARD if trial.entry == "forward" else BACKWARD
    try:
        concerned = [oracle for oracle in oracles if oracle.concerns(trial)]
        found = [oracle.name for oracle in concerned if oracle.judge(trial).finding is not None]
    except HostError:
        return (MEMORY,)
    return tuple(found)


def convicting_apart(make: Callable[[], Trial]) -> tuple[str, ...]:
    """The same in a process of its own, which a fault may end or hold: EXECUTION alone then."""
    ours, theirs = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_answer, args=(make, theirs))
    process.start()
    theirs.close()
    try:
        found: tuple[str, ...] = ours.recv()
    except EOFError:
        found = (EXECUTION,)
    process.join()
    ours.close()
    return found


def _answer(make: Callable[[], Trial], to: Connection) -> None:
    faulthandler.disable()  # a crash is an answer
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    to.send(convicting(make()))
