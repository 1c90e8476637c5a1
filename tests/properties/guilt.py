"""From verdicts to a failing test."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st

from verify.case import Case
from verify.court import Court, Docket, explain


class Guilty(AssertionError):
    """A failing verdict.  Each oracle raises a class of its own, so that shrinking does not slip from one to another."""


@cache
def _guilty(oracle: str) -> type[Guilty]:
    return type(f"Guilty_{oracle}", (Guilty,), {})


_failing: set[str] = set()


def hold(court: Court, docket: Docket, source: st.DataObject | str) -> None:
    """Judge a drawn problem, or the case of an id; raise Guilty with the explanation of the first failing verdict."""
    __tracebackhide__ = True
    name = f"{docket.id}-{docket.group}"
    if isinstance(source, str):
        verdicts = court.hear(docket, Case.parse(source).problem, "witness")
    else:
        problem = source.draw(docket.problems, label="problem")
        verdicts = court.hear(docket, problem, "shrink" if name in _failing else "generate")
    failed = [verdict for verdict in verdicts if verdict.outcome == "fail"]
    if failed:
        _failing.add(name)
        raise _guilty(failed[0].oracle)(explain(failed[0]))
