"""From verdicts to a failing test."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache

from hypothesis import strategies as st

from verify.case import Case
from verify.court import Court, Docket, explain
from verify.evidence import Verdict


class Guilty(AssertionError):  # noqa: N818 - a verdict
    """A failing verdict.  Each oracle raises a class of its own, so that shrinking does not slip from one to another."""


@cache
def _guilty(oracle: str) -> type[Guilty]:
    return type(f"Guilty_{oracle}", (Guilty,), {})


@dataclass
class _Search:
    """What one docket's search has found: failing cases by id, and the seconds that shrinking them took."""

    failed: dict[str, list[Verdict]] = field(default_factory=dict)
    shrinking: float = 0.0


_SHRINK_SECONDS = float(os.environ.get("VERIFY_SHRINK_SECONDS", "20"))
_searches: defaultdict[str, _Search] = defaultdict(_Search)


def hold(court: Court, docket: Docket, source: st.DataObject | str) -> None:
    """Judge a drawn problem, or the case of an id; raise Guilty with the explanation of the first failing verdict.

    A case that failed once stays failed, whatever chance has in mind, and shrinking gives up looking for a smaller one when its
    time is over (a hang costs a deadline at every step).
    """
    __tracebackhide__ = True
    if isinstance(source, str):
        _convict(court.hear(docket, Case.parse(source).problem, "witness"))
        return
    search = _searches[f"{docket.id}-{docket.group}"]
    problem = source.draw(docket.problems, label="problem")
    if problem.name in search.failed:
        _convict(search.failed[problem.name])
    if search.shrinking > _SHRINK_SECONDS:
        return
    begun = time.monotonic()
    verdicts = court.hear(docket, problem, "shrink" if search.failed else "generate")
    if search.failed:
        search.shrinking += time.monotonic() - begun
    if any(verdict.outcome == "fail" for verdict in verdicts):
        search.failed[problem.name] = verdicts
    _convict(verdicts)


def _convict(verdicts: list[Verdict]) -> None:
    __tracebackhide__ = True
    for verdict in verdicts:
        if verdict.outcome == "fail":
            raise _guilty(verdict.oracle)(explain(verdict))
