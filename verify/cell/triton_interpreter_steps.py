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


def moved(width: int, addresses: Array, offsets: Array) -> Array:
    """Addresses so many elements of `width` bytes further."""
    same_bits = offsets.dtype == np.int64
    offsets = offsets.view(np.uint64) if same_bits else offsets.astype(np.uint64)
    found: Array = addresses + width * offsets
    return found


def _add_pointer(interpreter: Any, pointer: Any, offset: Any, result: Any) -> Made:
    return functools.partial(moved, max(1, pointer.get_element_ty().primitive_bitwidth // 8))


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

    of_a, of_b, of_d = (each.dtype.scalar.name for each in (left, right, added))
    tf32 = of_a == "fp32" and given[0] == ir.INPUT_PRECISION.TF32
    if tf32 or of_d != "fp32" or not {of_a, of_b} <= {"fp32", "fp16", "bf16"}:
        return None

    def wide(x: Array, name: str) -> Array:
        return decode(x, name).astype(np.float32, copy=False)

    def made(a: Array, b: Array, d: Array) -> Array:
        with np.errstate(all="ignore"):
            found: Array = np.matmul(wide(a, of_a), wide(b, of_b)) + d
            return found

    return made


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
