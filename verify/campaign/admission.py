"""Admission: whether a case on record, or one typed by a user, can be asked of a kernel under its
present declaration.

Drawn problems are inside the support and fit their group by construction; the problem of a case id
need not be.  If a case is not admitted, that is no verdict on the kernel.
"""

from __future__ import annotations

from dataclasses import replace

from verify.campaign.targets import Target, excludes_group, excludes_problem
from verify.oracles import groups
from verify.problem import Problem
from verify.problem.refusal import excludes
from verify.variant import default_dtype_out

_MOST_BYTES = 8 << 30  # of q, k, v and out together
_MOST_PAIRS = 1 << 37  # (query, key) pairs: twice the largest square that is asked, over four heads


def unanswerable(target: Target, problem: Problem) -> str | None:
    """One line that says why the target's group cannot ask its kernel the problem, or None."""
    group = groups().get(target.group)
    if group is None:
        return f"unknown group {target.group!r} (groups: {', '.join(groups())})"
    declaration = target.declaration
    reason = excludes_group(declaration, group.name)
    if reason is not None:
        return f"group {group.name} does not ask {declaration.name}, which {reason}"
    outside = support_refusal(target, problem)
    if group.outside:
        inside = outside is None
        return (
            f"group {group.name} asks problems outside the support; this is inside"
            if inside
            else None
        )
    if outside is not None:
        return f"outside the declared support: {outside}"
    return too_large(problem) or _not_of_the_group(target, problem)


def support_refusal(target: Target, problem: Problem) -> str | None:
    """The argument for which the target's kernel refuses a problem, and the reason; or None."""
    support, wide = target.declaration.support, default_dtype_out(problem.dtype)
    if problem.dtype_out not in (wide, *support.dtypes_out):
        return f"dtype_out: {problem.dtype_out} is not supported for {problem.dtype}"
    # The rules for layouts treat the upstream gradient like O.
    twins = [problem]
    if groups()[target.group].entry == "backward":
        twins.append(problem.but(layout_out=problem.layout_dout))
    for twin in twins:
        excluded = excludes(support, twin)
        if excluded is not None:
            return ": ".join(excluded)
    return None


def too_large(problem: Problem) -> str | None:
    """Why a problem is too large to be judged, or None."""
    sizes = [problem.layouts[name].extent(shape) for name, shape in problem.shapes.items()]
    needed = sum(sizes) * problem.format.itemsize
    if needed > _MOST_BYTES:
        return (
            f"too large: q, k, v and out need {needed / 2**30:.3g} GiB; {_MOST_BYTES >> 30} are the"
            " most"
        )
    if problem.pairs > _MOST_PAIRS:
        return (
            f"too large: {problem.pairs:.3g} pairs of a query and a key; {_MOST_PAIRS:.3g} are the"
            " most"
        )
    return None


def _not_of_the_group(target: Target, problem: Problem) -> str | None:
    group, support = groups()[target.group], target.declaration.support
    if group.distributions is not None and problem.distribution not in group.distributions:
        return (
            f"group {group.name} asks dist={' or '.join(group.distributions)}, not"
            f" {problem.distribution}"
        )
    reason = None if group.excludes_problem is None else group.excludes_problem(problem)
    reason = reason or excludes_problem(target, problem)
    if reason is not None:
        return f"group {group.name} cannot ask it: {reason}"
    if group.admits is not None:
        possible = group.admits(problem, support)
    elif group.adapt is not None:
        possible = group.adapt(problem, support) == problem
    else:
        # Problems for Triton's interpreter are smaller; both kinds can be on record.
        kinds = (replace(target.declaration, interpreted=way) for way in (False, True))
        asked = (replace(target, declaration=kind).asked for kind in kinds)
        possible = group.asks is None or any(problem in problems for problems in asked)
    return None if possible else f"group {group.name} asks no such problem ({group.about})"
