"""Operands of Triton's binary operators, made alike by a plan made once for each pair of types.

Triton decides for every operation anew which type both operands are cast to and which shape they
are broadcast to.  Both depend on the operands' types alone, so `plan_once` remembers them.  Nor are
operands copied to that shape: numpy broadcasts within the operation, which all operators are that
ask for it (what they return is of the full shape, since both operands go into it).

Left to Triton: plain numbers outside int32 or fp32's normal range, integer types that such numbers
need not fit, blocks of different ranks, and whatever raises.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

_INT32 = 1 << 31
_TINY = 2.0**-126  # fp32's least normal number
_HUGE = (2 - 2.0**-23) * 2.0**127  # and its largest
_WIDE = ("int32", "int64")  # what every int32 fits


@dataclass(frozen=True, slots=True)
class _Side:
    """What becomes of one operand: it is cast to `scalar` unless that is None, then of `type`.

    same: it is left as it is.
    """

    scalar: Any
    type: Any
    same: bool


def plan_once(interpreter: Any) -> None:
    """Replace TritonSemantic's `binary_op_type_checking_impl`."""
    semantic, core = interpreter.TritonSemantic, interpreter.tl.core
    make_alike = semantic.binary_op_type_checking_impl
    tensor_class = core.tensor
    plans: dict[Hashable, tuple[_Side, _Side] | None] = {}  # None: each time anew

    def key(operand: Any) -> str:
        kind = type(operand)
        if kind is tensor_class:
            return str(operand.type.name)
        if kind is int:
            return "int" if -_INT32 <= operand < _INT32 else ""
        if kind is float:
            size = abs(operand)
            # What Triton takes for an fp32; NaN, which it does too, is left to it.
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
            # Raises where they cannot be made alike.
            done: tuple[Any, Any] = make_alike(self, lhs, rhs, *flags)
            if of_pair not in plans:
                plans[of_pair] = _plan(core, lhs, rhs, done) if left and right else None
            return done
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


def _plan(core: Any, lhs: Any, rhs: Any, done: tuple[Any, Any]) -> tuple[_Side, _Side] | None:
    """What was done to two operands, for others of the same types.

    None where it may depend on more than the types.
    """
    tensors = [part for part in (lhs, rhs) if type(part) is core.tensor]
    ranks = {len(part.type.shape) for part in tensors if part.type.is_block()}
    if len(ranks) > 1 or any(not _plain(part.type.scalar) for part in done):
        return None
    sides = []
    for before, after in zip((lhs, rhs), done, strict=True):
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
    """Whether a type's name says all of it."""
    return not scalar.is_ptr() or scalar.address_space == 1
