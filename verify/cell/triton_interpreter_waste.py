"""Removes needless work from Triton's interpreter: no result depends on it.

The interpreter spends two thirds of its time on this work, since tensor programs are short and
their tiles small.  Each item is left out, or done once:

- overflow checks of integers, whose result is ignored unless `debug` is on;
- patching the language's functions at every call of a device function;
- looking up numpy dtypes in a table that is built for each look-up;
- making types, shapes and names again for every tensor, although only a few occur;
- broadcasting blocks that have the same shape already;
- deciding each time what a binary operator does with operands of the same types
  (`verify.cell.triton_interpreter_operands`);
- copying keyword arguments at every call of the language, and then searching them;
- looking for compile-time constants in values that hold none;
- comparing dtypes by name and element sizes by their bits, and choosing casts among a dozen kinds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from verify.cell.triton_interpreter_operands import plan_once
from verify.cell.triton_interpreter_recording import Now, note


def spare(interpreter: Any) -> None:
    """Replace these places in triton.runtime.interpreter and in the language that it interprets."""
    _spare_checks(interpreter)
    _patch_once(interpreter)
    _look_up_once(interpreter)
    _make_types_once(interpreter.tl.core)
    _broadcast_where_needed(interpreter.tl.core, interpreter.TritonSemantic)
    _pass_keywords_on(interpreter)
    _unwrap_plainly(interpreter.tl.core)
    _compare_names(interpreter.tl.core)
    _check_sizes_once(interpreter)
    _cast_plainly(interpreter)
    _add_axes_once(interpreter)
    plan_once(interpreter)


def _spare_checks(interpreter: Any) -> None:
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_once(interpreter: Any) -> None:
    tl, patch_lang = interpreter.tl, interpreter._patch_lang

    languages: dict[Any, list[Any]] = {}  # by function: the modules of the language that it sees

    def patch_once(fn: Any) -> Any:
        modules = languages.get(fn)
        if modules is None:
            modules = [each for each in fn.__globals__.values() if each is tl or each is tl.core]
            languages[fn] = modules
        done = modules and not any(
            map(tl.core.is_builtin, (tl.tensor.__add__, *[module.load for module in modules]))
        )
        return interpreter._LangPatchScope() if done else patch_lang(fn)

    interpreter._patch_lang = patch_once


def _look_up_once(interpreter: Any) -> None:
    tl, np_dtype = interpreter.tl, interpreter._get_np_dtype

    @functools.cache
    def of_scalar(name: str) -> Any:
        return np_dtype(tl.dtype(name))

    def np_dtype_once(tt_dtype: Any) -> Any:
        scalar = tt_dtype.scalar
        return np_dtype(tt_dtype) if scalar.is_ptr() else of_scalar(scalar.name)

    interpreter._get_np_dtype = np_dtype_once


def _sizes(core: Any, shape: Any) -> tuple[int, ...] | None:
    """A shape as plain integers, or None if it holds anything else (which its class refuses)."""
    if type(shape) is core.tuple:
        shape = shape.values
    elif type(shape) is not list:
        return None
    sizes = tuple([size.value if type(size) is core.constexpr else size for size in shape])
    return sizes if all(type(size) is int for size in sizes) else None


def _make_types_once(core: Any) -> None:
    """Share the shape, size and name of equal block types, and of tensors of equal types: nothing
    changes them."""
    of_types: dict[Hashable, tuple[Any, Any, Any]] = {}
    of_tensors: dict[str, tuple[Any, Any]] = {}  # a type's name holds its shape
    make_type: Callable[..., None] = core.block_type.__init__
    make_tensor: Callable[..., None] = core.tensor.__init__

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = _sizes(core, shape)
        key = (element_ty.name, sizes)
        fields = of_types.get(key) if sizes is not None else None
        if fields is not None:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = fields
            return
        make_type(self, element_ty, shape)  # raises if this is not a shape
        if sizes is not None:
            of_types[key] = self.shape, self.numel, self.name

    def tensor(self: Any, handle: Any, type: Any) -> None:
        fields = of_tensors.get(type.name)
        if fields is None:
            make_tensor(self, handle, type)
            of_tensors[type.name] = self.numel, self.shape
            return
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.numel, self.shape = fields

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor


def _broadcast_where_needed(core: Any, semantic: Any) -> None:
    broadcast = semantic.broadcast_impl_value

    def broadcast_where_needed(self: Any, lhs: Any, rhs: Any) -> Any:
        if not (lhs.type.is_block() and rhs.type.is_block()):
            return broadcast(self, lhs, rhs)
        left: list[int] = lhs.type.shape.values
        right: list[int] = rhs.type.shape.values
        if left == right:
            return lhs, rhs
        both = [b if a == 1 else a for a, b in zip(left, right, strict=False)]
        if len(left) != len(right) or any(
            b not in (1, n) for b, n in zip(right, both, strict=True)
        ):
            return broadcast(self, lhs, rhs)  # adds axes, or raises
        return widened(self, lhs, left, both), widened(self, rhs, right, both)

    def widened(self: Any, tensor: Any, shape: list[int], wanted: list[int]) -> Any:
        if shape == wanted:
            return tensor
        handle = self.builder.create_broadcast(tensor.handle, wanted)
        return core.tensor(handle, core.block_type(tensor.type.scalar, wanted))

    semantic.broadcast_impl_value = broadcast_where_needed


def _pass_keywords_on(interpreter: Any) -> None:
    semantic, core = interpreter.interpreter_semantic, interpreter.tl.core
    # The wrapper that `builtin` adds only checks for the keyword that `call` passes.
    checking = core.builtin(lambda: None).__code__

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = member.__wrapped__ if getattr(member, "__code__", None) is checking else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        operator = _OPERATORS.get(name) if obj is core.tensor else None
        scope.set_attr(obj, name, call if operator is None else _operator(core, semantic, operator))

    interpreter._patch_attr = patch_attr


# As methods of TritonSemantic, and what these get beside the operands.
_OPERATORS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "__add__": ("add", (True,)),
    "__sub__": ("sub", (True,)),
    "__mul__": ("mul", (True,)),
    "__and__": ("and_", ()),
    "__or__": ("or_", ()),
    "__floordiv__": ("floordiv", ()),
    "__mod__": ("mod", ()),
}


def _operator(core: Any, semantic: Any, operator: tuple[str, tuple[Any, ...]]) -> Any:
    name, more = operator
    method = getattr(semantic, name)

    def call(self: Any, other: Any, **kwargs: Any) -> Any:
        return method(self, core._unwrap_if_constexpr(other), *more)

    return call


def _unwrap_plainly(core: Any) -> None:
    """Return most values directly: they are no compile-time constants, and hold none."""
    unwrap: Callable[[Any], Any] = core._unwrap_if_constexpr
    constant = core.constexpr
    plain = {core.tensor, core.dtype, core.block_type, core.pointer_type}
    plain |= {int, float, bool, str, type(None)}

    def unwrapped(o: Any) -> Any:
        kind = type(o)
        if kind is constant:
            return o.value
        return o if kind in plain else unwrap(o)

    core._unwrap_if_constexpr = unwrapped


def _compare_names(core: Any) -> None:
    """Compare dtypes by identity first: most compared scalar types are the same object."""
    equal: Callable[[Any, Any], bool] = core.dtype.__eq__

    def same(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    core.dtype.__eq__ = same


def _check_sizes_once(interpreter: Any) -> None:
    """Check once per pair of dtypes whether an array's elements fit a type."""
    check: Callable[[Any, Any], bool] = interpreter._validate_np_data_size
    refuse: Callable[[Any], None] = interpreter.TensorHandle.__post_init__
    fitting: set[tuple[str, int]] = set()

    def checked(np_array: Any, tl_dtype: Any) -> bool:
        key = tl_dtype.name, np_array.itemsize
        if key not in fitting:
            if not check(np_array, tl_dtype):
                return False
            fitting.add(key)
        return True

    def made(self: Any) -> None:
        if not checked(self.__dict__["data"], self.dtype):
            refuse(self)

    interpreter._validate_np_data_size = checked
    interpreter.TensorHandle.__post_init__ = made


def _cast_plainly(interpreter: Any) -> None:
    """Make a cast one call between integers, and between fp32 and formats wider than 8 bits."""
    semantic, core = interpreter.TritonSemantic, interpreter.tl.core
    handle_class = interpreter.TensorHandle
    cast: Callable[..., Any] = semantic.cast
    integers = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
    plain = {(a, b) for a in integers for b in integers}
    plain |= {("fp32", name) for name in ("fp16", "bf16", "fp64")}
    plain |= {(name, "fp32") for name in ("fp16", "bf16", "int32")}

    def recorded(made: Any, source: Any, scalar: Any) -> Any:
        result = handle_class(made(source.__dict__["data"]), scalar)
        note(made, [source], [result])
        return result

    def plainly(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        source = input.type
        scalar = dst_ty.scalar
        name = source.scalar.name
        if fp_downcast_rounding is not None or (name, scalar.name) not in plain:
            return cast(self, input, dst_ty, fp_downcast_rounding)
        if name == scalar.name:
            return input
        if "bf16" in (name, scalar.name):
            handle = self.builder.cast_impl(input.handle, scalar)
        elif Now.recording is None:
            handle = handle_class(
                input.handle.data.astype(interpreter._get_np_dtype(scalar)), scalar
            )
        else:
            kind = interpreter._get_np_dtype(scalar)
            handle = recorded(lambda data: data.astype(kind), input.handle, scalar)
        return core.tensor(handle, source.with_element_ty(scalar) if source.is_block() else dst_ty)

    semantic.cast = plainly


def _add_axes_once(interpreter: Any) -> None:
    """Make the type of a block with one more axis once for each type and axis."""
    semantic, core = interpreter.TritonSemantic, interpreter.tl.core
    handle_class = interpreter.TensorHandle
    expand_dims: Callable[..., Any] = semantic.expand_dims
    types: dict[tuple[str, int], tuple[Any, tuple[int, ...]]] = {}

    def recorded(made: Any, source: Any, scalar: Any) -> Any:
        result = handle_class(made(source.__dict__["data"]), scalar)
        note(made, [source], [result])
        return result

    def expanded(self: Any, input: Any, axis: int) -> Any:
        known = types.get((input.type.name, axis))
        if known is None or known[0].scalar is not input.type.scalar:
            result = expand_dims(self, input, axis)
            types[input.type.name, axis] = result.type, result.handle.__dict__["data"].shape
            return result
        if Now.recording is not None:
            shape = known[1]
            scalar = input.handle.dtype.scalar
            handle = recorded(lambda data: data.reshape(shape), input.handle, scalar)
            return core.tensor(handle, known[0])
        data = input.handle.data
        return core.tensor(
            handle_class(data.reshape(known[1]), input.handle.dtype.scalar), known[0]
        )

    semantic.expand_dims = expanded
