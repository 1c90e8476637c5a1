"""Where the buffers of a trial's launches lie, with the workspaces that the kernel wants."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from verify.cell.arena import Plan, plan, torch_dtype, workspace_limit
from verify.cell.process import Reply
from verify.problem import Problem

_MOST_MEMORY = 8 << 30  # bytes of one run's buffers


@dataclass(frozen=True)
class _Shaped:
    """A problem, for what depends on its shapes and memory alone."""

    shape: Hashable
    problem: Problem = field(compare=False)


def _shape_of(p: Problem) -> Hashable:
    lengths = p.batch, p.heads_q, p.heads_kv, p.seqlen_q, p.seqlen_kv, p.head_dim, p.head_dim_v
    return lengths, p.dtype, p.dtype_out, p.quantisation, tuple(p.layouts.items())


@lru_cache(maxsize=8)  # siblings ask one after the other
def _plain(shaped: _Shaped, lse: bool, entry: str) -> Plan:
    """The layout without workspaces."""
    return plan(shaped.problem, lse=lse, workspace={}, entry=entry)


def plan_of(
    problem: Problem, entry: str, lse: bool, ask: Callable[[Plan], Reply] | None
) -> Plan | Reply:
    """The layout of an entry's buffers (one of `verify.variant.RUNS`), or the reply if the request
    for workspaces failed, or asks for what cannot be had.

    lse: whether a forward has one.  ask: asks for the workspaces of an entry that wants any, given
    the layout of all else.
    """

    kind = "backward" if entry == "backward" else "forward"
    lse = lse or kind == "backward"

    def laid_out(workspace: Mapping[str, tuple[tuple[int, ...], str]]) -> Plan:
        return plan(problem, lse=lse, workspace=workspace, entry=kind)

    layout = _plain(_Shaped(_shape_of(problem), problem), lse, kind)
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
