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
- Scalar indices: one-element arrays become Python integers again (numpy >= 2.4 refuses that for
  triton 3.6).
- Needless work is left out (`verify.cell.triton_interpreter_waste`).

Not repaired: atomics on bf16, which raise here; ulp-level differences of exp2 and log2; fused
multiply-add.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.arithmetic.dtypes import DTYPES, DType
from verify.cell.triton_interpreter_waste import spare

Array = NDArray[Any]

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
    "TritonSemantic.cast": ("self", "input", "dst_ty", "fp_downcast_rounding"),
    "tl.core._unwrap_if_constexpr": ("o",),
    "tl.core.dtype.__eq__": ("self", "other"),
    "_validate_np_data_size": ("np_array", "tl_dtype"),
    "TensorHandle.__post_init__": ("self",),
    "TritonSemantic.binary_op_sanitize_overflow_impl": ("self", "lhs", "rhs", "binary_op"),
    "TritonSemantic.device_assert": ("self", "cond", "msg", "mask"),
    f"{_BUILDER}.cast_impl": ("self", "src", "dst_type"),
    f"{_BUILDER}.create_fp_to_fp": ("self", "src", "dst_type", "rounding_mode"),
    f"{_BUILDER}.create_dot": ("self", "a", "b", "d", "input_precision", "max_num_imprecise_acc"),
    f"{_BUILDER}.unary_op": ("self", "arg", "op"),
    f"{_BUILDER}.binary_op": ("self", "lhs", "rhs", "op"),
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


@dataclass(frozen=True)
class _Encoding:
    """The bits of a float format: sign, exponent, fraction.  `beyond` encodes values above
    `max`."""

    format: DType
    storage: str  # the numpy dtype that the interpreter keeps it in
    saturates: bool
    nan: int  # the NaN that hardware writes

    @property
    def bits(self) -> str:
        return f"uint{8 * self.format.itemsize}"

    @property
    def largest(self) -> int:
        return int(_magnitude_bits(np.array([self.format.max]), self.format, np.rint)[0])

    @property
    def beyond(self) -> int:
        return self.largest if self.saturates else self.largest + 1


def _encoding(name: str, storage: str, *, saturates: bool = False, nan: int) -> _Encoding:
    return _Encoding(DTYPES[name], storage, saturates, nan)


# Triton's name of a dtype -> its encoding.
_ENCODINGS = {
    "fp64": _encoding("float64", "float64", nan=0x7FFF_FFFF_FFFF_FFFF),
    "fp32": _encoding("float32", "float32", nan=0x7FFF_FFFF),
    "fp16": _encoding("float16", "float16", nan=0x7FFF),
    "bf16": _encoding("bfloat16", "uint16", nan=0x7FFF),
    "fp8e4nv": _encoding("float8_e4m3fn", "uint8", saturates=True, nan=0x7F),
    "fp8e5": _encoding("float8_e5m2", "uint8", saturates=True, nan=0x7F),
}
_PACKED = ("bf16", "fp8e4nv", "fp8e5")  # kept as integers


def _magnitude_bits(magnitude: Array, format: DType, rounding: Callable[[Array], Array]) -> Array:
    """The bits of finite magnitudes (float64).  They count the format's numbers, whose spacing at
    exponent e is 2**(e - p + 1)."""
    _, exponent = np.frexp(magnitude)
    exponent = np.where(magnitude == 0, format.emin, np.maximum(exponent - 1, format.emin)).astype(
        np.int64
    )
    count = rounding(
        np.ldexp(magnitude, (format.precision - 1 - exponent).astype(np.int32))
    ).astype(np.int64)
    return np.asarray(count + ((exponent - format.emin) << (format.precision - 1)))


def encode(values: Array, dtype: str, *, toward_zero: bool = False) -> Array:
    """Round floats or integers to a format; returns the interpreter's storage of it.

    dtype: triton's name of the format ("bf16", "fp8e4nv", ...).  It rounds once, to nearest, ties
    to even, or toward zero; every step before is exact for floats up to float64.
    """
    encoding = _ENCODINGS[dtype]
    if dtype == "bf16" and values.dtype == np.float32 and not toward_zero:
        return _upper_halves(values)
    with np.errstate(all="ignore"):
        if dtype not in _PACKED and not toward_zero:
            return values.astype(encoding.storage)  # numpy's own floats round to nearest
        wide = values.astype(np.float64)
        finite = np.isfinite(wide)
        bits = _magnitude_bits(
            np.abs(np.where(finite, wide, 0.0)),
            encoding.format,
            np.trunc if toward_zero else np.rint,
        )
    too_large = encoding.largest if toward_zero else encoding.beyond
    bits = np.where(bits > encoding.largest, too_large, bits)
    bits = np.where(finite, bits, encoding.beyond) | np.where(
        np.signbit(wide), 1 << (8 * encoding.format.itemsize - 1), 0
    )
    bits = np.where(np.isnan(wide), encoding.nan, bits)
    return bits.astype(encoding.bits).view(encoding.storage)


def _upper_halves(values: Array) -> Array:
    """fp32 to the nearest bf16, as uint16.  Both have the same exponents: a carry moves into the
    upper half."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + (odd + np.uint32(0x7FFF))) >> np.uint32(16)
    nan = np.uint32(_ENCODINGS["bf16"].nan)
    return np.where(np.isnan(values), nan, rounded.reshape(values.shape)).astype(np.uint16)


@functools.cache
def _values_of_all_bits(dtype: str) -> Array:
    """The value of each 8-bit pattern, as fp32."""
    format = _ENCODINGS[dtype].format
    bits = np.arange(256)
    exponent, fraction = (
        (bits & 0x7F) >> (format.precision - 1),
        bits & ((1 << (format.precision - 1)) - 1),
    )
    hidden = np.where(exponent > 0, 1 << (format.precision - 1), 0)
    shift = np.maximum(exponent, 1) - 1 + format.emin - (format.precision - 1)
    values = np.ldexp((hidden + fraction).astype(np.float64), shift.astype(np.int32))
    if dtype == "fp8e5":  # all ones in the exponent: infinity and NaN, as in IEEE 754
        values[exponent == 0x1F] = np.where(fraction[exponent == 0x1F] == 0, np.inf, np.nan)
    else:  # e4m3 has no infinity and one NaN of each sign
        values[(bits & 0x7F) == 0x7F] = np.nan
    return np.asarray(np.where(bits < 0x80, values, -values), np.float32)


def decode(data: Array, dtype: str) -> Array:
    """The exact values of the interpreter's storage of a format: packed formats as fp32, the others
    unchanged."""
    if dtype == "bf16":
        return np.asarray((data.astype(np.uint32) << 16).view(np.float32))
    return np.asarray(_values_of_all_bits(dtype)[data]) if dtype in _PACKED else data


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
        if source not in _PACKED and target not in _PACKED:
            return cast_impl(self, src, dst_type)
        values = decode(src.data, source)
        data = (
            encode(values, target)
            if target in _ENCODINGS
            else values.astype(interpreter._get_np_dtype(dst_type))
        )
        return handle(data, dst_type.scalar)

    def repaired_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        source, target = _name(src), _name(dst_type)
        if source not in _ENCODINGS or target not in _ENCODINGS:  # formats of other vendors
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
        if _name(a) not in _ENCODINGS or "fp64" in (_name(a), _name(b)):
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
        if _name(arg) not in _PACKED:
            return unary_op(self, arg, op)
        return result(op(decode(arg.data, _name(arg))), arg)

    def repaired_binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if _name(lhs) not in _PACKED:
            return binary_op(self, lhs, rhs, op)
        return result(op(decode(lhs.data, _name(lhs)), decode(rhs.data, _name(rhs))), lhs)

    def repaired_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if _name(z) not in _PACKED:
            return create_fma(self, x, y, z)
        wide = [decode(part.data, _name(part)).astype(np.float64) for part in (x, y, z)]
        return result(wide[0] * wide[1] + wide[2], z)

    def refusing_atomic(
        self: Any, rmwOp: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        if _name(val) in _PACKED:
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
            if _name(input) not in _PACKED:
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
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = repaired_patch
