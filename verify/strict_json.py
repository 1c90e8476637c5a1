"""Strict JSON for evidence and reports: typed records out and in, NaN and infinities as the strings "nan", "inf", "-inf".

RFC 8259 has no token for them, and Python's own `NaN` breaks every other reader.  A field typed `float` reads the three
strings back as numbers; so does free-form data (`Any`), which therefore cannot hold these three as text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

T = TypeVar("T")

_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_LEAST_EXACT = 2**53  # larger integers are not exact in other readers of JSON; none of ours comes near


class ShapeError(ValueError):
    """Data that has not the declared shape; the message gives the path to the place and what stands there."""


def encode(value: Any) -> Any:
    """`value` as JSON-ready data: dataclasses become objects, tuples and sets arrays, non-finite floats strings."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(encode(item) for item in value)
    if isinstance(value, float):
        number = float(value)  # a numpy scalar is a float too
        return number if math.isfinite(number) else ("nan" if math.isnan(number) else "inf" if number > 0 else "-inf")
    if value is None or isinstance(value, str | bool | int):
        return value
    raise TypeError(f"{type(value).__name__} is no JSON value: {value!r}")


def dumps(value: Any, *, indent: int | None = None) -> str:
    """`encode`d value as text; one line unless indented, and the same text for equal values."""
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(encode(value), allow_nan=False, ensure_ascii=False, indent=indent, separators=separators)


def loads(text: str | bytes) -> Any:
    """Parse; raises ValueError for what is not strict JSON (Python's NaN and Infinity tokens included)."""

    def refuse(token: str) -> None:
        raise ValueError(f"{token} is not JSON (write it as a string)")

    return json.loads(text, parse_constant=refuse)


def decode(shape: type[T], data: Any, where: str = "") -> T:
    """`data` (from `loads`) as a dataclass or TypedDict; unknown keys are ignored, so that later writers may add some.

    Raises ShapeError, which begins with the path to the offending place.
    """
    value: T = _decode(shape, data, where or shape.__name__)
    return value


def _decode(hint: Any, data: Any, where: str) -> Any:
    origin = get_origin(hint)
    if hint is Any:
        return _free(data)
    if origin in (Union, UnionType):
        return _decode_union(get_args(hint), data, where)
    if origin is Literal:
        return _expect(data in get_args(hint), data, data, where, f"one of {', '.join(map(repr, get_args(hint)))}")
    if origin in (list, tuple):
        _expect(isinstance(data, list), data, data, where, "an array")
        items = [_decode(get_args(hint)[0], item, f"{where}[{i}]") for i, item in enumerate(data)]
        return items if origin is list else tuple(items)
    if origin is dict:
        _expect(isinstance(data, dict), data, data, where, "an object")
        return {key: _decode(get_args(hint)[1], item, f"{where}.{key}") for key, item in data.items()}
    if is_typeddict(hint) or is_dataclass(hint):
        return _decode_record(hint, data, where)
    return _decode_scalar(hint, data, where)


def _decode_scalar(hint: Any, data: Any, where: str) -> Any:
    if hint is float:
        if isinstance(data, str) and data in _SPECIAL:
            return _SPECIAL[data]
        _expect(isinstance(data, int | float) and not isinstance(data, bool), data, data, where, "a number")
        return float(data)
    if hint is int:
        right = isinstance(data, int) and not isinstance(data, bool) and abs(data) <= _LEAST_EXACT
        return _expect(right, data, data, where, "an integer")
    if hint is type(None):
        return _expect(data is None, data, None, where, "null")
    return _expect(isinstance(data, hint), data, data, where, {str: "a string", bool: "true or false"}.get(hint, str(hint)))


def _decode_union(options: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in options:
        return None
    problems = []
    for option in options:
        if option is type(None):
            continue
        try:
            return _decode(option, data, where)
        except ShapeError as error:
            problems.append(error)
    raise problems[0]


def _decode_record(shape: Any, data: Any, where: str) -> Any:
    _expect(isinstance(data, dict), data, data, where, "an object")
    values = {}
    for name, (hint, optional) in _layout(shape).items():
        if name in data:
            values[name] = _decode(hint, data[name], f"{where}.{name}")
        elif not optional:
            raise ShapeError(f"{where}.{name}: is missing")
    build: Callable[..., Any] = shape
    return build(**values)


@cache
def _layout(shape: Any) -> dict[str, tuple[Any, bool]]:
    """Field name -> (type, whether it may be absent)."""
    hints = get_type_hints(shape)
    if is_typeddict(shape):
        return {name: (hint, name in shape.__optional_keys__) for name, hint in hints.items()}
    optional = {f.name for f in fields(shape) if f.default is not MISSING or f.default_factory is not MISSING}
    return {f.name: (hints[f.name], f.name in optional) for f in fields(shape) if f.init}


def _free(data: Any) -> Any:
    if isinstance(data, str):
        return _SPECIAL.get(data, data)
    if isinstance(data, list):
        return [_free(item) for item in data]
    return {key: _free(item) for key, item in data.items()} if isinstance(data, dict) else data


def _expect(right: bool, data: Any, value: Any, where: str, wanted: str) -> Any:
    if not right:
        raise ShapeError(f"{where}: got {json.dumps(data)[:60]}, but should be {wanted}")
    return value
