"""Whether a problem lies inside a support, and which argument a kernel must name if not."""

from __future__ import annotations

from verify.problem import Layout, Problem
from verify.variant import ROW_ALIGNMENT, Support


def excludes(support: Support, problem: Problem) -> tuple[str, str] | None:
    """The argument for which a kernel of that support must refuse a problem, and why; or None."""
    refused = support.refusal(problem)
    if refused is not None:
        return refused
    for name, layout in problem.layouts.items():
        if name == "dout":  # only a backward sees it
            continue
        if support.layouts == "contiguous" and layout != Layout():
            return f"layout_{name}", f"{layout.name} is not contiguous"
        aligned = layout.aligned(problem.shapes[name], problem.format.itemsize, ROW_ALIGNMENT)
        if support.layouts == "aligned" and not aligned:
            return (
                f"layout_{name}",
                f"rows of {layout.name} are not aligned to {ROW_ALIGNMENT} bytes",
            )
    return None


def inside(support: Support, problem: Problem | None) -> bool:
    """Whether that problem, its layouts included, is one that a kernel of that support must
    answer."""
    return problem is not None and excludes(support, problem) is None
