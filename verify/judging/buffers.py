"""Where the buffers of a trial's launches lie, with the workspaces that the kernel wants."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from verify.cell.arena import Plan, plan, torch_dtype, workspace_limit
from verify.cell.process import Reply
from verify.problem import Problem

_MOST_MEMORY = 8 << 30  # bytes of one run's buffers


def plan_of(
    problem: Problem, entry: str, lse: bool, ask: Callable[[Plan], Reply] | None
) -> Plan | Reply:
    """The layout of an entry's buffers (one of `verify.variant.RUNS`), or the reply if the request
    for workspaces failed, or asks for what cannot be had.

    lse: whether a forward has one.  ask: asks for the workspaces of an entry that wants any, given
    the layout of all else.
    """

    def laid_out(workspace: Mapping[str, tuple[tuple[int, ...], str]]) -> Plan:
        kind = "backward" if entry == "backward" else "forward"
        return plan(problem, lse=lse or kind == "backward", workspace=workspace, entry=kind)

    layout = laid_out({})
    if ask is None:
        return layout
    reply = ask(layout)
    # the run will refuse too, with buffers that can be checked
    if reply.status == "unsupported":
        return layout
    if not reply.ok:
        return reply
    try:
        wanted = {
            name: (tuple(shape), dtype) for name, (shape, dtype) in reply.data["workspace"].items()
        }
        taken = sum(
            math.prod(shape) * torch_dtype(dtype).itemsize for shape, dtype in wanted.values()
        )
        most = workspace_limit(problem)
        if taken > most:
            return Reply(
                "breach",
                f"workspace: {taken} bytes for this problem, at most {most}"
                " (docs/adding-a-kernel.md)",
            )
        found = laid_out(wanted)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        return Reply("breach", f"workspace: {type(error).__name__}: {error}")
    if found.size > _MOST_MEMORY or any(n < 0 for shape, _ in wanted.values() for n in shape):
        return Reply("breach", f"workspace: {wanted} cannot be had")
    return found
