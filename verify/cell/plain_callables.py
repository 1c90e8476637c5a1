"""Callables that are no functions, as functions with the signature of what they run: an instance of
torch.nn.Module, an operator of torch.library, the `apply` of a torch.autograd.Function, a
functools.partial, and other objects with `__call__`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from verify.variant import DeclarationError

_OPERATORS = (torch._ops.OpOverloadPacket, torch._ops.OpOverload)


def is_callable(value: object, name: str) -> bool:
    """Whether a value that a module holds under this name is such a callable.

    A kernel of Triton, which has to be launched, is none, nor is a function of C++ under its own
    name: a file that imports it only uses it.
    """
    return (
        callable(value)
        and not (inspect.isbuiltin(value) and value.__name__ == name)
        and not inspect.isfunction(value)
        and not inspect.isclass(value)
        and not type(value).__module__.startswith("triton.")
    )


def as_function(value: Any, name: str, module: Any) -> Callable[..., Any]:
    """A function that calls the value by its signature.

    name, module: where the value was found, which the function gets.  Raises DeclarationError for a
    value whose parameters cannot be read, unless the module's LIKE says them.
    """
    try:
        signature, source = _signature(value)
    except (TypeError, ValueError):
        if not hasattr(module, "LIKE"):
            raise DeclarationError(
                f"{name}: a {type(value).__name__} whose parameters cannot be read: call it from a"
                " function that is defined by def, or say which signature it is LIKE"
            ) from None
        signature, source = inspect.signature(lambda *args, **keywords: None), None

    def function(*args: Any, **keywords: Any) -> Any:
        bound = signature.bind(*args, **keywords)
        if not is_apply(value):
            return value(*bound.args, **bound.kwargs)
        bound.apply_defaults()  # apply takes positions alone
        return value(*bound.args)

    function.__name__ = function.__qualname__ = name
    function.__module__ = module.__name__
    vars(function)["__signature__"] = signature
    if source is not None:
        vars(function)["__wrapped__"] = source  # by which its return statements are read
    return function


def is_apply(value: Any) -> bool:
    """Whether a value is the `apply` of a torch.autograd.Function."""
    owner = getattr(value, "__self__", None)
    return (
        isinstance(owner, type)
        and issubclass(owner, torch.autograd.Function)
        and getattr(value, "__name__", "") == "apply"
    )


def _signature(value: Any) -> tuple[inspect.Signature, Callable[..., Any] | None]:
    """The signature of a callable, and the function with its source, if there is one.  Raises
    TypeError or ValueError for one that cannot be read."""
    if is_apply(value):
        owner = value.__self__
        given = inspect.signature(owner.forward)
        with_context = owner.setup_context is torch.autograd.Function.setup_context
        parameters = list(given.parameters.values())[1 if with_context else 0 :]
        return given.replace(parameters=parameters), owner.forward
    if isinstance(value, _OPERATORS):
        return _of_schema(value), None
    if isinstance(value, torch.nn.Module):
        return inspect.signature(value.forward), value.forward
    if isinstance(value, CustomOpDef):
        return inspect.signature(value._init_fn), value._init_fn
    return inspect.signature(value), None


def _of_schema(operator: Any) -> inspect.Signature:
    """The signature of torch.ops.library.name."""
    overload = getattr(operator, "default", operator)
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            inspect.Parameter(
                each.name,
                kinds[each.kwarg_only],
                default=each.default_value if each.has_default_value() else inspect.Parameter.empty,
            )
            for each in overload._schema.arguments
        ]
    )
