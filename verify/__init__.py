"""attention-verify: decides whether an attention kernel is right, and shows why.

Importing this package imports nothing but the standard library, so that `python -m verify` can set
up its own environment first.  `__all__` names what other projects may use: docs/api.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verify import bundle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from verify.door.checking import Report

__all__ = ["__version__", "check"]

__version__ = "0.1.0"

bundle.install()


def check(
    kernel: Callable[..., Any] | str | Path,
    *,
    layout: str | None = None,
    dtypes: Sequence[str] | None = None,
    head_dims: Sequence[int] | None = None,
    examples: int = 10,
    time: float | None = None,
    seed: int | None = None,
) -> Report:
    """Judge an attention function on random problems with every oracle.

    kernel: a function (q, k, v, ...) -> out or (out, lse) that is defined by `def` at the top level
    of a file, a test module included; or the path of a kernel file.

    layout: of its tensors, "bhsd" (batch, heads, seqlen, head_dim), the default, or "bshd" (batch,
    seqlen, heads, head_dim).

    dtypes: of the inputs, names as "bfloat16".  head_dims: the legal ones.  Both default to what
    the function's file says in DTYPES and HEAD_DIMS, then to docs/adding-a-kernel.md's.

    examples: random problems per dtype and group of oracles.  time: seconds after which no case
    begins.  seed: of the random problems.

    Returns a Report, which says in words whether gradients were judged.  Raises AssertionError with
    the explanation and the replay command of each kind of failure; TypeError for a function that
    the kernel's process cannot import; ValueError for an illegal argument; RuntimeError if the
    campaign cannot run, so that nothing is known of the kernel.
    """
    from verify.door import checking

    choices = checking.Choices(
        layout=layout,
        dtypes=None if dtypes is None else tuple(dtypes),
        head_dims=None if head_dims is None else tuple(head_dims),
        examples=examples,
        time=time,
        seed=seed,
    )
    return checking.check(kernel, choices)
