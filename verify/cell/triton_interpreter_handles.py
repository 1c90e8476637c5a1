"""The handles of arrays in what an operation of Triton's interpreter gets and returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

_IMMUTABLE = frozenset({int, float, bool, str, type(None)})


def handles_in(interpreter: Any, value: Any) -> list[Any]:
    """The handles in what a builder's method gets or returns, in a stable order.  Raises TypeError
    for a value that could hide some."""
    found: list[Any] = []
    _collect(interpreter, value, found)
    return found


def _collect(interpreter: Any, value: Any, found: list[Any]) -> None:
    kind = type(value)
    if kind is interpreter.TensorHandle:
        found.append(value)
    elif kind in _IMMUTABLE:
        return
    elif kind is tuple or kind is list:
        for each in value:
            _collect(interpreter, each, found)
    elif kind is dict:
        for each in value.values():
            _collect(interpreter, each, found)
    elif kind in (interpreter.BlockPointerHandle, interpreter.TensorDescHandle):
        for each in vars(value).values():
            _collect(interpreter, each, found)
    elif not _is_enum(interpreter, value):
        raise TypeError(f"a {kind.__name__} that an operation gets or returns")


def _is_enum(interpreter: Any, value: Any) -> bool:
    """Whether it is a type of Triton's, or one of its names for a way to do something."""
    if isinstance(value, (interpreter.tl.core.dtype, np.dtype, np.generic)):
        return True
    return type(value).__module__.startswith("triton._C") or callable(value)


def with_handles(interpreter: Any, value: Any, fresh: Iterator[Any]) -> Any:
    """The same with other handles."""
    if isinstance(value, interpreter.TensorHandle):
        return next(fresh)
    if isinstance(value, (tuple, list)):
        return type(value)([with_handles(interpreter, each, fresh) for each in value])
    if isinstance(value, dict):
        return {name: with_handles(interpreter, each, fresh) for name, each in value.items()}
    if isinstance(value, (interpreter.BlockPointerHandle, interpreter.TensorDescHandle)):
        made = object.__new__(type(value))
        vars(made).update(with_handles(interpreter, vars(value), fresh))
        return made
    return value
