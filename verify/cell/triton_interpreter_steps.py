"""The operations of Triton's interpreter as functions of arrays alone, for replayed programs.

`quick` gives the function for one call of the builder, or None.  The caller holds it against what
the call itself has made, bit for bit, before it is used; so nothing here decides what is right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from verify.cell.triton_interpreter_formats import ENCODINGS, PACKED, Array, decode, encode

Made = Callable[..., Any]


def quick(interpreter: Any, name: str, given: tuple[Any, ...], result: Any) -> Made | None:
    """A function from the arrays of the operands of a builder's method to that of its result."""
    find = _QUICK.get(name)
    return None if find is None else find(interpreter, *given, result)


def same(found: Any, wanted: Any) -> bool:
    """Whether both are arrays of the same bits."""
    return (
        type(found) is type(wanted)
        and found.dtype == wanted.dtype
        and found.shape == wanted.shape
        and found.tobytes() == wanted.tobytes()
    )


def quick_reduction(interpreter: Any, reduction: Any, result: Array) -> Made | None:
    """The same for a sum, a maximum or a minimum over an axis."""
    combine = {
        interpreter.tl.standard._sum_combine: np.add,
        interpreter.tl.standard._elementwise_max: np.fmax,
        interpreter.tl.standard._elementwise_min: np.fmin,
    }.get(reduction.combine_fn)
    if combine is None or not isinstance(reduction, interpreter.ReduceOps):
        return None
    reduce, axis, keeps, kind = combine.reduce, reduction.axis, reduction.keep_dims, result.dtype
    if reduction.axis is None or (combine is np.add and (not result.shape or result.size == 1)):
        return None
    if not result.shape or result.size == 1:
        shape, plain = result.shape, np.asarray
        return lambda x: plain(reduce(x, axis=axis)).reshape(shape)
    if combine is np.add:
        return lambda x: reduce(x, axis=axis, keepdims=keeps).astype(kind, copy=False)
    return lambda x: reduce(x, axis=axis, keepdims=keeps)


@functools.lru_cache(maxsize=64)
def _ones(shape: tuple[int, ...]) -> Array:
    return np.ones(shape, dtype=bool)


@functools.lru_cache(maxsize=64)
def _zeros(shape: tuple[int, ...], kind: np.dtype[Any]) -> Array:
    return np.zeros(shape, dtype=kind)


def _cast(interpreter: Any, source: Any, target: Any, result: Any) -> Made | None:
    before, after = source.dtype.scalar.name, target.scalar.name
    if before not in PACKED and after not in PACKED:
        kind = result.data.dtype
        return lambda x: x.astype(kind)
    if after in ENCODINGS:
        return lambda x: encode(decode(x, before), after)
    return None


def _add_pointer(interpreter: Any, pointer: Any, offset: Any, result: Any) -> Made:
    width = np.uint64(max(1, pointer.get_element_ty().primitive_bitwidth // 8))
    unsigned = np.uint64
    if offset.data.dtype == np.int64:
        return lambda p, o: p + width * o.view(unsigned)
    return lambda p, o: p + width * o.astype(unsigned)


def _divide(interpreter: Any, left: Any, right: Any, result: Any) -> Made:
    fmod = np.fmod
    return lambda a, b: (a - fmod(a, b)) // b


def _shift(interpreter: Any, left: Any, right: Any, result: Any) -> Made | None:
    signed = left.data.dtype.kind == right.data.dtype.kind == "i"
    return np.right_shift if signed else None


def _reshape(interpreter: Any, *given: Any) -> Made:
    shape = given[-1].data.shape
    return lambda x: x.reshape(shape)


def _broadcast(interpreter: Any, source: Any, shape: Any, result: Any) -> Made:
    wanted, to = result.data.shape, np.broadcast_to
    return lambda x: to(x, wanted)


def _splat(interpreter: Any, kind: Any, source: Any, result: Any) -> Made | None:
    if source.data.size != 1:
        return None
    shape, of, empty = result.data.shape, result.data.dtype, np.empty

    def filled(x: Array) -> Array:
        found = empty(shape, of)
        found.fill(x.item())
        return found

    return filled


def _transpose(interpreter: Any, source: Any, permutation: Any, result: Any) -> Made:
    order = tuple(permutation)
    return lambda x: x.transpose(order)


def _load(interpreter: Any, pointers: Any, *given: Any) -> Made:
    load, kind, shape = interpreter._interpreter.load, given[-1].data.dtype, pointers.data.shape
    everywhere, nothing = _ones(shape), _zeros(shape, kind)
    return lambda p: load(p, everywhere, nothing, kind)


def _masked_load(interpreter: Any, pointers: Any, mask: Any, other: Any, *given: Any) -> Made:
    load, kind = interpreter._interpreter.load, given[-1].data.dtype
    if other is not None:
        return lambda p, m, o: load(p, m, o, kind)
    nothing = _zeros(pointers.data.shape, kind)
    return lambda p, m: load(p, m, nothing, kind)


def _dot(interpreter: Any, left: Any, right: Any, added: Any, *given: Any) -> Made | None:
    """Without the checks of `_repair_dot`; tf32 has none."""
    from triton._C.libtriton import ir

    names = [each.dtype.scalar.name for each in (left, right, added)]
    wide = [_TO_FP32.get(name) for name in names]
    tf32 = names[0] == "fp32" and given[0] == ir.INPUT_PRECISION.TF32
    if tf32 or names[2] != "fp32" or wide[0] is None or wide[1] is None:
        return None
    a_wide, b_wide = wide[0], wide[1]
    product, ignored = np.matmul, np.errstate

    def made(a: Array, b: Array, d: Array) -> Array:
        with ignored(all="ignore"):
            found: Array = product(a_wide(a), b_wide(b)) + d
            return found

    return made


_TO_FP32: dict[str, Made] = {
    "fp32": lambda x: x,
    "fp16": lambda x: x.astype(np.float32),
    "bf16": lambda x: (x.astype(np.uint32) << np.uint32(16)).view(np.float32),
}

_QUICK: dict[str, Callable[..., Made | None]] = {
    "cast_impl": _cast,
    "create_addptr": _add_pointer,
    "create_idiv": _divide,
    "create_ashr": _shift,
    "create_expand_dims": _reshape,
    "create_reshape": _reshape,
    "create_broadcast": _broadcast,
    "create_splat": _splat,
    "create_trans": _transpose,
    "create_dot": _dot,
    "create_load": _load,
    "create_masked_load": _masked_load,
}


def stores(interpreter: Any, name: str, given: tuple[Any, ...]) -> Made | None:
    """The same for a store, which has no result to hold it against."""
    store = interpreter._interpreter.store
    if name == "create_masked_store":
        found: Made = store
        return found
    if name == "create_store":
        everywhere = _ones(given[0].data.shape)
        return lambda p, v: store(p, v, everywhere)
    return None
