"""The arguments of a launch in Triton's interpreter, of the types that a compiled kernel gets.

A number that is no tl.constexpr is a tensor of one element there: a float of fp32, or of the dtype
that its annotation names, and an annotated integer of the integer dtype that it names.  The
interpreter leaves a float as a number of Python, and ignores annotations.  So its fp16 block times
a float argument is a product in fp16 by a factor rounded to fp16, where a compiled kernel extends
the block to fp32; arithmetic on float arguments alone is in double precision; and an argument
annotated int64 wraps at 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from verify.cell.triton_interpreter_formats import Array, encode

_FLOATS = frozenset({"fp16", "bf16", "fp32", "fp64"})
_INTEGERS = frozenset(f"{sign}{bits}" for sign in "iu" for bits in (8, 16, 32, 64))


def converter(interpreter: Any, fn: Any) -> Callable[[str, Any], Any]:
    """A function from the name and the value of an argument of `fn`, which is no tl.constexpr, to
    what the source computes with.

    It raises OverflowError for an integer outside of its annotation's dtype, and TypeError for a
    float that an integer is annotated for, as a compiled kernel's launch does.
    """
    from triton.runtime.jit import _normalize_ty

    def dtype(annotation: Any) -> str:
        if isinstance(annotation, str):  # the interpreter's own text of it, perhaps a name
            annotation = annotation.strip("'\"")
            annotation = fn.__globals__.get(annotation, annotation)
        name = str(_normalize_ty(annotation))
        return name if name in _FLOATS | _INTEGERS else ""

    names = {name: dtype(each) for name, each in fn.__annotations__.items()}
    return lambda name, value: _converted(interpreter, value, names.get(name, ""))


def _converted(interpreter: Any, value: Any, annotation: str) -> Any:
    if isinstance(value, tuple):
        made = [_converted(interpreter, each, "") for each in value]
        return interpreter._tuple_create(value, made)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and (annotation in _FLOATS or (isinstance(value, float) and not annotation)):
        name = annotation or "fp32"
        return _tensor(interpreter, encode(np.array([float(value)]), name), name)
    if number and annotation in _INTEGERS:
        if isinstance(value, float):
            raise TypeError(f"{value!r} for an argument that is annotated {annotation}")
        kind = np.dtype(f"{annotation[0]}{int(annotation[1:]) // 8}")
        return _tensor(interpreter, np.array([value], kind), annotation)
    return interpreter._implicit_cvt(value)


def _tensor(interpreter: Any, data: Array, name: str) -> Any:
    kind = interpreter.tl.str_to_ty(name, None)
    return interpreter.tl.core.tensor(interpreter.TensorHandle(data, kind), kind)
