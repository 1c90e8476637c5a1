"""attention-verify: decides whether an attention kernel is right, and shows why.

Importing this package imports nothing but the standard library, so that `python -m verify` can set
up its own environment first.  `__all__` names what other projects may use: docs/api.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verify import bundle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from verify.door.checking import Report

__all__ = ["__version__", "check", "checked"]

__version__ = "0.1.0"

bundle.install()


def check(  # noqa: PLR0913 - users write each of them as a word
    kernel: Callable[..., Any] | str | Path,
    *,
    layout: str | None = None,
    dtypes: Sequence[str] | None = None,
    head_dims: Sequence[int] | None = None,
    masks: Sequence[str] | None = None,
    grad: bool = True,
    like: str | None = None,
    within: Mapping[str, Any] | None = None,
    examples: int | None = None,
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

    masks: kinds of masks, words of `python -m references.masks`; by default those that the
    function's parameters can express.

    grad: whether gradients by autograd are judged, in bfloat16 and float32, if the function is
    differentiable.

    like: the name of a public signature ("flash_attn_func"...: verify/adapters/) that the function
    has, with its layout, its masks and the meaning of its parameters.

    within: what else its problems must hold, words of support (docs/adding-a-kernel.md) as
    {"seqlen_kv_multiple": 64, "grouped_heads": "only", "scales": "positive"}.

    examples: random problems per dtype and group of oracles, 10 by default.  time: seconds after
    which no case begins.  seed: of the random problems.  Defaults of these three are what the
    pyproject.toml of the current directory says in [tool.verify].

    Returns a Report, which says in words whether gradients were judged.  Raises AssertionError with
    the explanation and the replay command of each kind of failure; TypeError for a function that
    the kernel's process cannot import; ValueError for an illegal argument; RuntimeError if the
    campaign cannot run, so that nothing is known of the kernel.
    """
    from verify.door import checking

    choices = checking.Choices(
        layout=layout,
        dtypes=_tuple(dtypes),
        head_dims=_tuple(head_dims),
        masks=_tuple(masks),
        grad=grad,
        like=like,
        within=within,
        examples=examples,
        time=time,
        seed=seed,
    )
    return checking.check(kernel, choices)


def checked(**choices: Any) -> Callable[[Callable[..., Any]], Callable[[], None]]:
    """A decorator that makes a test of an attention function: calling it is `check` of the function
    with these arguments.

    The name must be one that pytest collects (test_...), at the top level of its file.
    """

    def decorate(function: Callable[..., Any]) -> Callable[[], None]:
        def test() -> None:
            __tracebackhide__ = True
            check(test, **choices)

        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(test, name, getattr(function, name))
        vars(test)["attention"] = function
        return test

    return decorate


def _tuple(value: Any) -> Any:
    """A list as a tuple; what is neither stays, for its error to show it."""
    return tuple(value) if isinstance(value, list | range) else value
