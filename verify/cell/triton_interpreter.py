"""Repairs of Triton's interpreter, so that a kernel computes there what it computes on an NVIDIA
GPU.

The interpreter stores bfloat16 and 8-bit floats as integers of the same width.  In several places
it computes with these integers as if they were the values.  Its conversions between float formats
truncate, lose carries and misread infinities.  `repair` replaces these places:

- Float casts round to nearest, ties to even (or toward zero if asked); 8-bit formats saturate, as
  `cvt.rn.satfinite` does.
- tl.dot converts operands exactly to fp32 and accumulates in fp32; tf32 drops the low 13 bits of
  fp32 operands, as mma.sync and wgmma do with registers that hold fp32.
- bf16 and fp8 arithmetic, comparisons, sums and scans work on values: they compute in fp32 and
  round once.
- minimum and maximum return the operand that is not NaN, unless NaN shall propagate, as min.f32 and
  max.f32 do.
- A float among a launch's arguments is fp32, and annotated numbers are of the annotation's dtype
  (`verify.cell.triton_interpreter_arguments`).
- Scalar indices: one-element arrays become Python integers again (numpy >= 2.4 refuses that for
  triton 3.6).
- Needless work is left out (`verify.cell.triton_interpreter_waste`), and of programs that take the
  same path one is interpreted (`verify.cell.triton_interpreter_replay`).

Not repaired: atomics on bf16, which raise here; ulp-level differences of exp2 and log2; fused
multiply-add.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from verify.cell.triton_interpreter_formats import ENCODINGS, PACKED, Array, decode, encode
from verify.cell.triton_interpreter_programs import replay_programs
from verify.cell.triton_interpreter_recording import decided
from verify.cell.triton_interpreter_waste import spare

# The functions that repair() replaces or calls, with the parameters that it expects.  Triton 3.6
# and 3.7 have the same.
_BUILDER = "InterpreterBuilder"
_INTERNALS = {
    "TensorHandle": ("data", "dtype", "attr"),
    "_get_np_dtype": ("tt_dtype",),
    "_patch_lang": ("fn",),
    "_patch_lang_tensor": ("tensor", "scope"),
    "_LangPatchScope": (),
    "_patch_attr": ("obj", "name", "member", "builder", "scope"),
    "tl.core.block_type": ("element_ty", "shape"),
    "tl.core.tensor": ("handle", "type"),
    "tl.core.tensor_descriptor_base_type": ("block_type",),
    "tl.str_to_ty": ("name", "c"),
    "TritonSemantic.broadcast_impl_value": ("self", "lhs", "rhs"),
    "TritonSemantic.binary_op_type_checking_impl": (
        "self",
        "lhs",
        "rhs",
        "allow_lhs_ptr",
        "allow_rhs_ptr",
        "arithmetic_check",
        "div_or_mod",
    ),
    "TritonSemantic.expand_dims": ("self", "input", "axis"),
    "TritonSemantic.cast": ("self", "input", "dst_ty", "fp_downcast_rounding"),
    "tl.core._unwrap_if_constexpr": ("o",),
    "tl.core.dtype.__eq__": ("self", "other"),
    "_validate_np_data_size": ("np_array", "tl_dtype"),
    "TensorHandle.__post_init__": ("self",),
    "TritonSemantic.binary_op_sanitize_overflow_impl": ("self", "lhs", "rhs", "binary_op"),
    "GridExecutor.__call__": ("self", "args_dev", "kwargs"),
    "GridExecutor._init_args_hst": ("self", "args_dev", "kwargs"),
    "GridExecutor._restore_args_dev": ("self", "args_dev", "args_hst", "kwargs", "kwargs_hst"),
    "_implicit_cvt": ("arg",),
    "BlockPointerHandle": ("base", "shape", "strides", "offsets", "block_shape", "order"),
    "TensorDescHandle": ("base", "shape", "strides", "block_shape", "padding"),
    "ReduceScanOpInterface.apply": ("self", "input"),
    f"{_BUILDER}.create_make_block_ptr": (
        "self",
        "base",
        "shape",
        "strides",
        "offsets",
        "block_shape",
        "order",
    ),
    f"{_BUILDER}.create_advance": ("self", "ptr", "offsets"),
    "TritonSemantic.device_assert": ("self", "cond", "msg", "mask"),
    f"{_BUILDER}.cast_impl": ("self", "src", "dst_type"),
    f"{_BUILDER}.create_fp_to_fp": ("self", "src", "dst_type", "rounding_mode"),
    f"{_BUILDER}.create_dot": ("self", "a", "b", "d", "input_precision", "max_num_imprecise_acc"),
    f"{_BUILDER}.unary_op": ("self", "arg", "op"),
    f"{_BUILDER}.binary_op": ("self", "lhs", "rhs", "op"),
    f"{_BUILDER}.create_idiv": ("self", "lhs", "rhs"),
    f"{_BUILDER}.create_addptr": ("self", "ptr", "offset"),
    f"{_BUILDER}.create_select": ("self", "cond", "lhs", "rhs"),
    f"{_BUILDER}.create_clampf": ("self", "arg", "lo", "hi", "propagate_nans"),
    f"{_BUILDER}.create_fma": ("self", "x", "y", "z"),
    f"{_BUILDER}.create_minnumf": ("self", "lhs", "rhs"),
    f"{_BUILDER}.create_maxnumf": ("self", "lhs", "rhs"),
    f"{_BUILDER}.create_atomic_rmw": ("self", "rmwOp", "ptr", "val", "mask", "sem", "scope"),
    "ReduceOps.sum": ("self", "input"),
    "ScanOps.cumsum": ("self", "input"),
    "ScanOps.cumprod": ("self", "input"),
    "ReduceScanOpInterface.to_tensor": ("self", "ret", "dtype"),
}


@functools.cache
def repair() -> tuple[str, ...]:
    """Repair the interpreter in this process; returns the names of the repairs.

    A second call changes nothing.  The process must have set TRITON_INTERPRET=1 before it imported
    triton.  Raises RuntimeError if it has not, or if the interpreter of this triton differs from
    those that this module can repair.
    """
    import triton
    from triton.runtime import interpreter

    if not triton.knobs.runtime.interpret:
        raise RuntimeError(
            "Triton's interpreter is off: set TRITON_INTERPRET=1 before triton is imported"
        )
    _check_internals(interpreter, triton.__version__)
    repairs = {
        "float-casts": _repair_casts,
        "dot-operands": _repair_dot,
        "packed-arithmetic": _repair_arithmetic,
        "packed-sums": _repair_sums,
        "min-max-nan": _repair_min_max,
        "scalar-index": _repair_index,
        "waste": spare,
        "replay": replay_programs,
    }
    for apply in repairs.values():
        apply(interpreter)
    return tuple(repairs)


def _check_internals(interpreter: Any, version: str) -> None:
    """Raise RuntimeError, naming every function of `_INTERNALS` that is missing or has other
    parameters."""
    differences = []
    for path, parameters in _INTERNALS.items():
        try:
            member = functools.reduce(getattr, path.split("."), interpreter)
            if tuple(inspect.signature(member).parameters) != parameters:
                differences.append(
                    f"{path}{inspect.signature(member)}, expected ({', '.join(parameters)})"
                )
        except AttributeError:
            differences.append(f"no {path}")
    if differences:
        raise RuntimeError(
            f"triton {version}: its interpreter differs from those that"
            f" verify/cell/triton_interpreter.py repairs (3.6, 3.7): {'; '.join(differences)}"
        )


def _name(handle_or_type: Any) -> str:
    """Triton's name of the scalar dtype of a handle or a type."""
    return str(getattr(handle_or_type, "dtype", handle_or_type).scalar.name)


def _repair_casts(interpreter: Any) -> None:
    import triton.language as tl
    from triton._C.libtriton import ir

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast_impl, create_fp_to_fp = builder.cast_impl, builder.create_fp_to_fp

    def repaired_cast(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = _name(src), _name(dst_type)
        if source not in PACKED and target not in PACKED:
            return cast_impl(self, src, dst_type)
        values = decode(src.data, source)
        data = (
            encode(values, target)
            if target in ENCODINGS
            else values.astype(interpreter._get_np_dtype(dst_type))
        )
        return handle(data, dst_type.scalar)

    def repaired_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        source, target = _name(src), _name(dst_type)
        if source not in ENCODINGS or target not in ENCODINGS:  # formats of other vendors
            return create_fp_to_fp(self, src, dst_type, rounding_mode)
        toward_zero = rounding_mode == ir.ROUNDING_MODE.RTZ
        return handle(
            encode(decode(src.data, source), target, toward_zero=toward_zero), dst_type.scalar
        )

    builder.cast_impl = repaired_cast
    builder.create_fp_to_fp = repaired_fp_to_fp
    builder.get_bf16 = lambda self, value: handle(encode(np.array([value]), "bf16"), tl.bfloat16)


def _repair_dot(interpreter: Any) -> None:
    from triton._C.libtriton import ir

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    create_dot = builder.create_dot

    def operand(source: Any, input_precision: Any) -> Array:
        values = decode(source.data, _name(source)).astype(np.float32)
        if _name(source) == "fp32" and input_precision == ir.INPUT_PRECISION.TF32:
            return (values.view(np.uint32) & np.uint32(0xFFFF_E000)).view(np.float32)
        return values

    def repaired_dot(
        self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
    ) -> Any:
        # integers, and double precision
        if _name(a) not in ENCODINGS or "fp64" in (_name(a), _name(b)):
            return create_dot(self, a, b, d, input_precision, max_num_imprecise_acc)
        with np.errstate(all="ignore"):
            product = np.matmul(operand(a, input_precision), operand(b, input_precision))
            return handle(encode(product + decode(d.data, _name(d)), _name(d)), d.dtype.scalar)

    builder.create_dot = repaired_dot


def _repair_arithmetic(interpreter: Any) -> None:
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    unary_op, binary_op, create_fma = builder.unary_op, builder.binary_op, builder.create_fma
    create_atomic_rmw = builder.create_atomic_rmw

    def result(data: Array, like: Any) -> Any:
        return handle(
            data if data.dtype == np.bool_ else encode(data, _name(like)), like.dtype.scalar
        )

    def repaired_unary(self: Any, arg: Any, op: Any) -> Any:
        if _name(arg) not in PACKED:
            return unary_op(self, arg, op)
        return result(op(decode(arg.data, _name(arg))), arg)

    def repaired_binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if _name(lhs) not in PACKED:
            return binary_op(self, lhs, rhs, op)
        return result(op(decode(lhs.data, _name(lhs)), decode(rhs.data, _name(rhs))), lhs)

    def repaired_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if _name(z) not in PACKED:
            return create_fma(self, x, y, z)
        wide = [decode(part.data, _name(part)).astype(np.float64) for part in (x, y, z)]
        return result(wide[0] * wide[1] + wide[2], z)

    def refusing_atomic(
        self: Any, rmwOp: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        if _name(val) in PACKED:
            raise NotImplementedError(
                f"atomic on {_name(val)}: Triton's interpreter would add bit patterns"
            )
        return create_atomic_rmw(self, rmwOp, ptr, val, mask, sem, scope)

    builder.unary_op, builder.binary_op, builder.create_fma = (
        repaired_unary,
        repaired_binary,
        repaired_fma,
    )
    builder.create_atomic_rmw = refusing_atomic


def _repair_sums(interpreter: Any) -> None:
    """Repair the reductions that work on the integers.  tl.max and similar ones widen first; all
    others combine element by element."""
    import triton.language as tl

    def repaired(original: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(self: Any, input: Any) -> Any:
            if _name(input) not in PACKED:
                return original(self, input)
            sums = original(
                self, self.to_tensor(decode(input.handle.data, _name(input)), tl.float32)
            )
            (wide,) = sums if isinstance(sums, list) else (sums,)
            data = encode(wide.handle.data, _name(input))
            kind = (
                tl.block_type(input.dtype, list(data.shape))
                if wide.type.is_block()
                else input.dtype
            )
            narrow = tl.core.tensor(interpreter.TensorHandle(data, input.dtype.scalar), kind)
            return [narrow] if isinstance(sums, list) else narrow

        return reduce

    for owner, name in (
        (interpreter.ReduceOps, "sum"),
        (interpreter.ScanOps, "cumsum"),
        (interpreter.ScanOps, "cumprod"),
    ):
        setattr(owner, name, repaired(getattr(owner, name)))


def _repair_min_max(interpreter: Any) -> None:
    from triton._C.libtriton import ir

    builder = interpreter.InterpreterBuilder

    def clamp(self: Any, arg: Any, lo: Any, hi: Any, propagate_nans: Any) -> Any:
        propagate = propagate_nans == ir.PROPAGATE_NAN.ALL
        least, greatest = (np.minimum, np.maximum) if propagate else (np.fmin, np.fmax)
        return self.binary_op(self.binary_op(arg, lo, greatest), hi, least)

    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    builder.create_clampf = clamp


def _repair_index(interpreter: Any) -> None:
    patch_lang_tensor = interpreter._patch_lang_tensor

    def repaired_patch(tensor: Any, scope: Any) -> None:
        patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: decided(self, _integer))
        scope.set_attr(tensor, "__bool__", lambda self: decided(self, _truth))

    interpreter._patch_lang_tensor = repaired_patch


def _integer(data: Array) -> int:
    return int(data.item())


def _truth(data: Array) -> bool:
    return bool(data) if data.size == 1 else True
