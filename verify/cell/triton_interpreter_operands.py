"""Triton's binary operators, planned once for each pair of operand types.

For every operation Triton decides again to which type it casts both operands, to which shape it
broadcasts them, which function of numpy computes it, and of which type the result is.  All of this
depends only on the operands' types, so `plan_once` remembers it.  Operands are not copied to the
common shape: numpy broadcasts inside the operation, and all operators that broadcast are such
operations.  Their result has the full shape, since both operands go into it.

Triton still handles plain numbers outside int32 or fp32's normal range, integer types that such
numbers may not fit, blocks of different ranks, formats kept as integers, operators that take more
than one operation of numpy, and everything that raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from verify.cell.triton_interpreter_formats import PACKED, Array
from verify.cell.triton_interpreter_recording import Now, note
from verify.cell.triton_interpreter_steps import moved

_INT32 = 1 << 31
_TINY = 2.0**-126  # fp32's least normal number
_HUGE = (2 - 2.0**-23) * 2.0**127  # and its largest
_WIDE = ("int32", "int64")  # types that hold every int32
# Methods of TritonSemantic whose two first arguments are the operands.
_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "minimum", "maximum"),
    *("and_", "or_", "xor_", "less_than", "less_equal", "greater_than", "greater_equal"),
    *("equal", "not_equal"),
)


@dataclass(frozen=True, slots=True)
class _Side:
    """The conversion of one operand: cast it to `scalar` unless that is None, then give it `type`.

    same: leave it as it is.
    """

    scalar: Any
    type: Any
    same: bool


@dataclass(frozen=True, slots=True)
class _Conversion:
    """What `binary_op_type_checking_impl` made of two operands: its plan, and the handles."""

    plan: tuple[_Side, _Side] | None
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class _Operation:
    """One operation of the builder: its function on arrays, and the handles it got and made."""

    compute: Callable[[Array, Array], Array]
    left: Any
    right: Any
    result: Any


@dataclass(frozen=True, slots=True)
class _Step:
    """A whole operator: the types to which operands are cast (None: as they are), the operation,
    the dtypes of its result in numpy and in Triton, and what tensors of its type share."""

    left: Any
    right: Any
    compute: Callable[[Array, Array], Array]
    kind: np.dtype[Any]
    scalar: Any
    fields: dict[str, Any]


class _Log:
    """The conversions and operations of the operators that are planned right now."""

    def __init__(self) -> None:
        self.entries: list[_Conversion | _Operation] | None = None

    def add(self, entry: _Conversion | _Operation) -> None:
        if self.entries is not None:
            self.entries.append(entry)


def plan_once(interpreter: Any) -> None:
    """Replace TritonSemantic's `binary_op_type_checking_impl` and its binary operators."""
    log = _Log()
    _convert_once(interpreter.TritonSemantic, interpreter.tl.core, log)
    _log_operations(interpreter.InterpreterBuilder, log)
    for name in _OPERATORS:
        _compute_at_once(interpreter, name, log)


def _key(operand: Any, tensor_class: type) -> str:
    """What a plan depends on: the type's name, or the kind of a plain number; "" if Triton
    decides every time."""
    kind = type(operand)
    if kind is tensor_class:
        return str(operand.type.name)
    if kind is int:
        return "int" if -_INT32 <= operand < _INT32 else ""
    if kind is float:
        size = abs(operand)
        # Triton takes these for fp32.  NaN too, but NaN is left to Triton.
        return "float" if _TINY <= size <= _HUGE or size in (0.0, math.inf) else ""
    return ""


def _convert_once(semantic: Any, core: Any, log: _Log) -> None:
    make_alike = semantic.binary_op_type_checking_impl
    tensor_class = core.tensor
    plans: dict[Hashable, tuple[_Side, _Side] | None] = {}  # None: Triton decides every time

    def alike(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        left = _key(lhs, tensor_class)
        right = _key(rhs, tensor_class)
        flags = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        of_pair = (left, right, flags)
        if of_pair not in plans:
            recording = Now.recording
            # A path has the same steps whether it is recorded before or after this.
            with nullcontext() if recording is None else recording.unnoted():
                # Raises if they have no common type.
                converted: tuple[Any, Any] = make_alike(self, lhs, rhs, *flags)
            plans[of_pair] = _plan(core, lhs, rhs, converted) if left and right else None
        plan = plans[of_pair]
        if plan is None:
            converted = make_alike(self, lhs, rhs, *flags)
        else:
            first, second = plan
            converted = (
                lhs if first.same else made(self, lhs, first),
                rhs if second.same else made(self, rhs, second),
            )
        log.add(_Conversion(plan, converted[0].handle, converted[1].handle))
        return converted

    def made(self: Any, operand: Any, side: _Side) -> Any:
        if type(operand) is not tensor_class:
            operand = self.scalar_constant(operand, side.scalar)
        elif side.scalar is not None:
            operand = self.cast(operand, side.scalar)
        return operand if operand.type is side.type else tensor_class(operand.handle, side.type)

    semantic.binary_op_type_checking_impl = alike


def _log_operations(builder: Any, log: _Log) -> None:
    """Log the builder's operations on values as they are, not those of packed formats."""
    binary_op, create_idiv, create_addptr = (
        builder.binary_op,
        builder.create_idiv,
        builder.create_addptr,
    )

    def logged_binary(self: Any, lhs: Any, rhs: Any, op: Callable[..., Array]) -> Any:
        result = binary_op(self, lhs, rhs, op)
        if lhs.dtype.scalar.name not in PACKED:
            log.add(_Operation(op, lhs, rhs, result))
        return result

    def logged_idiv(self: Any, lhs: Any, rhs: Any) -> Any:
        result = create_idiv(self, lhs, rhs)
        log.add(_Operation(lambda a, b: (a - np.fmod(a, b)) // b, lhs, rhs, result))
        return result

    def logged_addptr(self: Any, ptr: Any, offset: Any) -> Any:
        result = create_addptr(self, ptr, offset)
        width = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
        log.add(_Operation(partial(moved, width), ptr, offset, result))
        return result

    builder.binary_op = logged_binary
    builder.create_idiv = logged_idiv
    builder.create_addptr = logged_addptr


def _compute_at_once(interpreter: Any, name: str, log: _Log) -> None:
    """Replace one operator of TritonSemantic: its steps are those that Triton took for the first
    operands of the same types, on which `_step` checks them."""
    semantic, handle_class = interpreter.TritonSemantic, interpreter.TensorHandle
    tensor_class = interpreter.tl.core.tensor
    method = getattr(semantic, name)
    made = partial(_result, handle_class, tensor_class)
    steps: dict[Hashable, _Step | None] = {}  # None: Triton takes its own every time
    constants: dict[tuple[Any, str], Array] = {}

    def planned(self: Any, key: Hashable, lhs: Any, rhs: Any, *rest: Any) -> Any:
        outer, log.entries = log.entries, []
        try:
            result = method(self, lhs, rhs, *rest)
            steps[key] = _step(log.entries, result)
        finally:
            if outer is not None:  # what plans this operator is no single operation
                outer += log.entries
            log.entries = outer
        return result

    def constant(self: Any, number: Any, scalar: Any) -> Array:
        found = constants.get((number, scalar.name))
        if found is None:
            found = self.scalar_constant(number, scalar).handle.data
            if number and len(constants) < _CONSTANTS:  # 0.0 == -0.0
                constants[number, scalar.name] = found
        return found

    def at_once(self: Any, lhs: Any, rhs: Any, *rest: Any, **named: Any) -> Any:
        if named:  # a part of another operator
            return method(self, lhs, rhs, *rest, **named)
        left = lhs.type.name if type(lhs) is tensor_class else _key(lhs, tensor_class)
        right = rhs.type.name if type(rhs) is tensor_class else _key(rhs, tensor_class)
        key = (left, right, rest)
        try:
            step = steps[key]
        except KeyError:
            if Now.recording is None:
                return planned(self, key, lhs, rhs, *rest)
            with Now.recording.unnoted():  # the plan's operations are noted, not its making
                planned(self, key, lhs, rhs, *rest)
            step = steps[key]
        if step is None:
            return method(self, lhs, rhs, *rest)
        if Now.recording is not None:
            result = _recorded(self, tensor_class, made, step, lhs, rhs)
            return method(self, lhs, rhs, *rest) if result is None else result
        if type(lhs) is tensor_class:
            a = (lhs if step.left is None else self.cast(lhs, step.left)).handle.data
        else:
            a = constant(self, lhs, step.left)
        if type(rhs) is tensor_class:
            b = (rhs if step.right is None else self.cast(rhs, step.right)).handle.data
        else:
            b = constant(self, rhs, step.right)
        data = step.compute(a, b)
        if data.dtype is not step.kind:
            return method(self, lhs, rhs, *rest)
        return made(step, data)

    setattr(semantic, name, at_once)


def _result(handle_class: Any, tensor_class: Any, step: _Step, data: Array) -> Any:
    """The tensor of a step's result."""
    handle = handle_class.__new__(handle_class)  # its size was checked when the step was planned
    handle.data = data
    handle.dtype = step.scalar
    handle.attr = {}
    result = tensor_class.__new__(tensor_class)
    result.__dict__.update(step.fields)
    result.handle = handle
    return result


def _recorded(
    semantic: Any, tensor_class: Any, made: Callable[..., Any], step: _Step, lhs: Any, rhs: Any
) -> Any:
    """The tensor of a step's result, while a program is recorded; None if it has another dtype."""
    sides = ((lhs, step.left), (rhs, step.right))
    left, right = (_operand(semantic, tensor_class, given, scalar) for given, scalar in sides)
    data = step.compute(left.__dict__["data"], right.__dict__["data"])
    if data.dtype is not step.kind:
        return None
    result = made(step, data)
    note(step.compute, [left, right], [result.handle])
    return result


def _operand(semantic: Any, tensor_class: Any, given: Any, scalar: Any) -> Any:
    """The handle of an operand, cast to `scalar` unless that is None."""
    if type(given) is not tensor_class:
        found = semantic.scalar_constant(given, scalar)
    else:
        found = given if scalar is None else semantic.cast(given, scalar)
    return found.handle


_CONSTANTS = 4096  # plain numbers that an operator keeps as arrays


def _step(entries: list[_Conversion | _Operation], result: Any) -> _Step | None:
    """The step of an operator that made `result`; None unless one conversion and one operation on
    what it made are all of it."""
    if len(entries) != 2:
        return None
    conversion, operation = entries
    if not isinstance(conversion, _Conversion) or not isinstance(operation, _Operation):
        return None
    handle = operation.result
    if conversion.plan is None or result.handle is not handle:
        return None
    compute = operation.compute
    if operation.left is conversion.right and operation.right is conversion.left:  # a pointer's

        def compute(a: Array, b: Array) -> Array:
            return operation.compute(b, a)

    elif operation.left is not conversion.left or operation.right is not conversion.right:
        return None
    fields = {name: value for name, value in vars(result).items() if name != "handle"}
    left, right = (side.scalar for side in conversion.plan)
    kind = handle.__dict__["data"].dtype
    return _Step(left, right, compute, kind, handle.dtype, fields)


def _plan(core: Any, lhs: Any, rhs: Any, converted: tuple[Any, Any]) -> tuple[_Side, _Side] | None:
    """The plan for two operands' types, from Triton's conversion of the operands.

    None if the conversion can depend on more than the types.
    """
    tensors = [part for part in (lhs, rhs) if type(part) is core.tensor]
    ranks = {len(part.type.shape) for part in tensors if part.type.is_block()}
    if len(ranks) > 1 or any(not _plain(part.type.scalar) for part in converted):
        return None
    sides = []
    for before, after in zip((lhs, rhs), converted, strict=True):
        scalar = after.type.scalar
        if type(before) is not core.tensor:
            if scalar.is_int() and scalar.name not in _WIDE:
                return None
            sides.append(_Side(scalar, after.type, False))
        else:
            cast = None if before.type.scalar.name == scalar.name else scalar
            sides.append(_Side(cast, after.type, before.type.name == after.type.name))
    return sides[0], sides[1]


def _plain(scalar: Any) -> bool:
    """Whether the type's name determines the type."""
    return not scalar.is_ptr() or scalar.address_space == 1
