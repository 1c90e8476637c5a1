"""Conversion of the operands of Triton's binary operators, planned once for each pair of types.

For every operation Triton decides again to which type it casts both operands, and to which shape it
broadcasts them.  Both depend only on the operands' types, so `plan_once` remembers them.  Operands
are not copied to the common shape: numpy broadcasts inside the operation, and all operators that
broadcast are such operations.  Their result has the full shape, since both operands go into it.

Triton still handles plain numbers outside int32 or fp32's normal range, integer types that such
numbers may not fit, blocks of different ranks, and everything that raises.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

_INT32 = 1 << 31
_TINY = 2.0**-126  # fp32's least normal number
_HUGE = (2 - 2.0**-23) * 2.0**127  # and its largest
_WIDE = ("int32", "int64")  # types that hold every int32


@dataclass(frozen=True, slots=True)
class _Side:
    """The conversion of one operand: cast it to `scalar` unless that is None, then give it `type`.

    same: leave it as it is.
    """

    scalar: Any
    type: Any
    same: bool


def plan_once(interpreter: Any) -> None:
    """Replace TritonSemantic's `binary_op_type_checking_impl`."""
    semantic, core = interpreter.TritonSemantic, interpreter.tl.core
    make_alike = semantic.binary_op_type_checking_impl
    tensor_class = core.tensor
    plans: dict[Hashable, tuple[_Side, _Side] | None] = {}  # None: Triton decides every time

    def key(operand: Any) -> str:
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

    def alike(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        left = key(lhs)
        right = key(rhs)
        flags = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        of_pair = (left, right, flags)
        plan = plans.get(of_pair)
        if plan is None:
            # Raises if they have no common type.
            converted: tuple[Any, Any] = make_alike(self, lhs, rhs, *flags)
            if of_pair not in plans:
                plans[of_pair] = _plan(core, lhs, rhs, converted) if left and right else None
            return converted
        first, second = plan
        return (
            lhs if first.same else made(self, lhs, first),
            rhs if second.same else made(self, rhs, second),
        )

    def made(self: Any, operand: Any, side: _Side) -> Any:
        if type(operand) is not tensor_class:
            operand = self.scalar_constant(operand, side.scalar)
        elif side.scalar is not None:
            operand = self.cast(operand, side.scalar)
        return operand if operand.type is side.type else tensor_class(operand.handle, side.type)

    semantic.binary_op_type_checking_impl = alike


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
