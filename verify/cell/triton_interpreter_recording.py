"""Where Triton's interpreter is recorded for `verify.cell.triton_interpreter_replay`.

While a program is recorded, the interpreter's builder is of a class whose operations are noted, and
a handle's array is a property that sees each read.  Otherwise nothing is in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from verify.cell.triton_interpreter_formats import PACKED
from verify.cell.triton_interpreter_handles import handles_in, with_handles
from verify.cell.triton_interpreter_plans import Array, Places
from verify.cell.triton_interpreter_replay import Recording
from verify.cell.triton_interpreter_steps import quick, quick_reduction, same, stores

_STORES = (
    *("create_store", "create_masked_store", "create_tensor_pointer_store"),
    *("create_descriptor_store", "create_descriptor_scatter"),
    *("create_atomic_rmw", "create_atomic_cas"),
)
_LOADS = (
    *("create_load", "create_masked_load", "create_tensor_pointer_load"),
    *("create_descriptor_load", "create_descriptor_gather"),
)
# Where the addresses and the mask of these are among the handles that they get.
_PLACES = {
    "create_load": Places(0),
    "create_masked_load": Places(0, 1),
    "create_store": Places(0),
    "create_masked_store": Places(0, 2),
    "create_atomic_rmw": Places(0, 2),
    "create_atomic_cas": Places(0),
}
# Operations that do more than to make arrays, or in an order of their own.
_UNRECORDED = ("create_print", "create_assert", "create_assume")
_POINTERS = ("create_make_block_ptr", "create_advance", "create_make_tensor_descriptor")
_PLAIN = ("binary_op", "unary_op", "ternary_op")  # a function of numpy on the operands' arrays


class Now:
    """The recording that goes on, if any."""

    recording: Recording | None = None


def note(made: Callable[..., Array], given: list[Any], results: list[Any]) -> None:
    """Note an operation on arrays that is no method of the builder."""
    recording = Now.recording
    if recording is not None and not recording.inside:
        recording.add(made, given, results)


def recording_builder(interpreter: Any) -> type:
    """The builder's class while a program is recorded."""
    base = type(interpreter.interpreter_builder)
    members: dict[str, Any] = {}
    for name in dir(base):
        method = getattr(base, name)
        if name in _PLAIN:
            members[name] = _plain_operation(interpreter, name, method)
        elif name in _POINTERS:
            members[name] = _pointer_operation(interpreter, name, method)
        elif name in _UNRECORDED:
            members[name] = _unrecorded(name, method)
        elif name == "create_get_program_id":
            members[name] = _of_grid(method, 0)
        elif name == "create_get_num_programs":
            members[name] = _of_grid(method, 3)
        elif name == "cast_impl" or (
            name.startswith(("create_", "get_")) and not name.endswith("_ty") and _reads(method)
        ):
            members[name] = _operation(interpreter, name, method)
    return type("RecordingBuilder", (base,), members)


def _reads(method: Any) -> bool:
    """Whether a builder's method makes or reads arrays itself, and not by another one."""
    return not set(method.__code__.co_names) <= {
        *("np", "binary_op", "unary_op", "ternary_op", "cast_impl", "create_idiv"),
        *(each for each in dir(np)),
    }


def _plain_operation(interpreter: Any, name: str, method: Callable[..., Any]) -> Any:
    whole = _operation(interpreter, name, method)

    def operation(self: Any, *given: Any) -> Any:
        recording = Now.recording
        assert recording is not None
        *operands, made = given
        if recording.inside or any(each.dtype.scalar.name in PACKED for each in operands):
            return whole(self, *given)
        recording.inside += 1
        try:
            result = method(self, *given)
            arrays = [each.__dict__["data"] for each in operands]
        finally:
            recording.inside -= 1
        data = result.__dict__["data"]
        if isinstance(made, np.ufunc) or made is np.where:
            kind = data.dtype
            # as `binary_op` does where the result is too wide for its type
            if made(*arrays).dtype != kind:
                plain = made

                def made(*each: Array) -> Array:
                    return plain(*each).astype(kind)

            recording.add(made, operands, [result])
            return result
        recording.add(_rerun(interpreter, self, method, given, operands), operands, [result])
        return result

    return operation


def _called(
    method: Callable[..., Any], builder: Any, given: Any, named: Any
) -> tuple[Any, Recording | None]:
    """The result of an operation, and the recording if it is to have this operation: not where
    another operation has made it."""
    recording = Now.recording
    assert recording is not None
    recording.inside += 1
    try:
        result = method(builder, *given, **named)
    finally:
        recording.inside -= 1
    return result, None if recording.inside or recording.lost else recording


def _operation(interpreter: Any, name: str, method: Callable[..., Any]) -> Any:
    effect = name in _STORES
    reads = name in _LOADS

    def operation(self: Any, *given: Any, **named: Any) -> Any:
        result, recording = _called(method, self, given, named)
        if recording is None:
            return result
        try:
            operands = handles_in(interpreter, (given, named))
            results = handles_in(interpreter, result)
        except TypeError as error:
            recording.lose(str(error))
            return result
        made = _rerun(interpreter, self, method, given, operands, named)
        if not named and recording.extending:
            made = _quicker(interpreter, name, given, operands, results, recording) or made
        places = _PLACES.get(name)
        recording.add(made, operands, results, effect=effect, reads=reads, places=places)
        return result

    return operation


def _quicker(
    interpreter: Any,
    name: str,
    given: tuple[Any, ...],
    operands: list[Any],
    results: list[Any],
    recording: Recording,
) -> Callable[..., Any] | None:
    """A function of arrays that is known to make the same, or None."""
    recording.inside += 1
    try:
        if name in _STORES:
            return stores(interpreter, name, given)
        if len(results) != 1:
            return None
        found = quick(interpreter, name, given, results[0])
        if found is None or not same(found(*[each.data for each in operands]), results[0].data):
            return None
        return found
    finally:
        recording.inside -= 1


def _rerun(
    interpreter: Any,
    builder: Any,
    method: Callable[..., Any],
    given: Any,
    operands: list[Any],
    named: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The method as a function of its operands' arrays to its result's."""
    kinds = [each.dtype for each in operands]
    make = interpreter.TensorHandle

    def made(*arrays: Array) -> Any:
        fresh = iter([make(array, kind) for array, kind in zip(arrays, kinds, strict=True)])
        args = with_handles(interpreter, given, fresh)
        result = method(builder, *args, **with_handles(interpreter, named or {}, fresh))
        results = [each.data for each in handles_in(interpreter, result)]
        return results[0] if len(results) == 1 else results

    return made


def _pointer_operation(interpreter: Any, name: str, method: Callable[..., Any]) -> Any:
    def operation(self: Any, *given: Any, **named: Any) -> Any:
        result, recording = _called(method, self, given, named)
        if recording is None:
            return result
        if name == "create_make_block_ptr":
            for new, old in zip(result.offsets, given[3], strict=True):
                recording.add(np.copy, [old], [new])
        elif name == "create_advance":
            pointer, steps = given
            for new, old, step in zip(result.offsets, pointer.offsets, steps, strict=True):
                recording.add(_advanced, [old, step], [new])
        else:  # it checks what it is given
            operands = handles_in(interpreter, (given, named))
            rerun = _rerun(interpreter, self, method, given, operands, named)
            recording.add(lambda *arrays: (rerun(*arrays), ())[1], operands, [], reads=True)
        return result

    return operation


def _advanced(offset: Array, step: Array) -> Array:
    found = offset.copy()
    found += step
    return found


def _unrecorded(name: str, method: Callable[..., Any]) -> Any:
    def operation(self: Any, *given: Any, **named: Any) -> Any:
        assert Now.recording is not None
        Now.recording.lose(name)
        return method(self, *given, **named)

    return operation


def _of_grid(method: Callable[..., Any], first: int) -> Any:
    def operation(self: Any, axis: int) -> Any:
        recording = Now.recording
        assert recording is not None
        recording.inside += 1
        try:
            result = method(self, axis)
        finally:
            recording.inside -= 1
        recording.known(result, first + axis)
        return result

    return operation


def record_reductions(interpreter: Any) -> None:
    """Note reductions and scans, which work on tensors, as operations on their arrays."""
    owner, core = interpreter.ReduceScanOpInterface, interpreter.tl.core
    apply = owner.apply

    def applied(self: Any, input: Any) -> Any:
        recording = Now.recording
        if recording is None or recording.inside or not isinstance(input, tuple):
            return apply(self, input)
        recording.inside += 1
        try:
            result = apply(self, input)
        finally:
            recording.inside -= 1
        types = [each.type for each in input]

        def made(*arrays: Array) -> Any:
            again = tuple(
                core.tensor(interpreter.TensorHandle(array, kind.scalar), kind)
                for array, kind in zip(arrays, types, strict=True)
            )
            results = [each.handle.data for each in apply(self, again)]
            return results[0] if len(results) == 1 else results

        operands, results = [each.handle for each in input], [each.handle for each in result]
        if len(operands) == len(results) == 1:
            wanted = results[0].__dict__["data"]
            found = quick_reduction(interpreter, self, wanted)
            if found is not None and same(found(operands[0].__dict__["data"]), wanted):
                made = found
        recording.add(made, operands, results)
        return result

    owner.apply = applied


def decided(tensor: Any, read: Callable[[Array], Any]) -> Any:
    """What the source reads in a tensor to go on."""
    if Now.recording is None:
        return read(tensor.handle.data)
    return Now.recording.decide(tensor.handle, read)
