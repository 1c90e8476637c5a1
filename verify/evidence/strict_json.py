"""Strict JSON for evidence and reports: typed records out and in, NaN and infinities as the strings
"nan", "inf", "-inf".

RFC 8259 has no token for them, and Python's own `NaN` breaks every other reader.  A field typed
`float` reads the three strings back as numbers; so does free-form data (`Any`), which therefore
cannot hold these three as text.
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
Keep = Callable[[str, str], str]
_Take = Callable[[Any], Any]

_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
# larger integers are not exact in other readers of JSON; none of ours comes near
_LEAST_EXACT = 2**53


class ShapeError(ValueError):
    """Data that has not the declared shape; the message gives the path to the place and what stands
    there."""


def encode(value: Any) -> Any:
    """`value` as JSON-ready data: dataclasses become objects, tuples and sets arrays, non-finite
    floats strings."""
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
        return (
            number
            if math.isfinite(number)
            else ("nan" if math.isnan(number) else "inf" if number > 0 else "-inf")
        )
    if value is None or isinstance(value, str | bool | int):
        return value
    raise TypeError(f"{type(value).__name__} is no JSON value: {value!r}")


def dumps(value: Any, *, indent: int | None = None) -> str:
    """`encode`d value as text; one line unless indented, and the same text for equal values."""
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(
        encode(value), allow_nan=False, ensure_ascii=False, indent=indent, separators=separators
    )


def loads(text: str | bytes) -> Any:
    """Parse text, or UTF-8; raises ValueError for what is not strict JSON (Python's NaN and
    Infinity tokens included)."""
    return _PARSER.decode(text if isinstance(text, str) else text.decode("utf-8"))


def _refuse(token: str) -> None:
    raise ValueError(f"{token} is not JSON (write it as a string)")


_PARSER = json.JSONDecoder(parse_constant=_refuse)


def decode(shape: type[T], data: Any, where: str = "") -> T:
    """`data` (from `loads`) as a dataclass or TypedDict; unknown keys are ignored, so that later
    writers may add some.

    Raises ShapeError, which begins with the path to the offending place.
    """
    hint: Any = shape
    found: T = _decoder(hint)(data, where or shape.__name__)
    return found


@cache
def _decoder(shape: Any) -> Callable[[Any, str], Any]:
    return decoder(shape, lambda text, _: text)


def decoder(shape: type[T], keep: Keep) -> Callable[[Any, str], T]:
    """`decode` of one shape, for reading many records: (data, where) -> record.

    keep: called as keep(text, text) for every string and every key of a `dict[str, ...]`; the
    `setdefault` of one dict makes equal strings one object.
    """
    take = _taking(shape, keep)

    def decoded(data: Any, where: str) -> T:
        try:
            found: T = take(data)
        except _MisfitError as misfit:
            raise ShapeError(f"{where}{''.join(reversed(misfit.steps))}: {misfit}") from None
        return found

    return decoded


class _MisfitError(Exception):
    """What is wrong; whoever it passes on its way out adds the step that leads to it, so that paths
    cost nothing till then."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.steps: list[str] = []


def _misfit(data: Any, wanted: str) -> _MisfitError:
    return _MisfitError(f"got {json.dumps(data)[:60]}, but should be {wanted}")


def _taking(hint: Any, keep: Keep) -> _Take:
    """What takes data of that type, built once: types are looked at here and not for every
    value."""
    origin = get_origin(hint)
    if hint is Any:
        return _free
    if origin in (Union, UnionType):
        return _of_union(get_args(hint), keep)
    if origin is Literal:
        return _of_literal(get_args(hint))
    if origin in (list, tuple):
        return _of_array(origin, _taking(get_args(hint)[0], keep))
    if origin is dict:
        return _of_mapping(_taking(get_args(hint)[1], keep), keep)
    if is_typeddict(hint) or is_dataclass(hint):
        return _of_record(hint, keep)
    return _of_text(keep) if hint is str else _SCALARS[hint]


def _number(data: Any) -> float:
    if type(data) is float:
        return data
    if isinstance(data, str) and data in _SPECIAL:
        return _SPECIAL[data]
    if not isinstance(data, int | float) or isinstance(data, bool):
        raise _misfit(data, "a number")
    return float(data)


def _integer(data: Any) -> int:
    if not isinstance(data, int) or isinstance(data, bool) or abs(data) > _LEAST_EXACT:
        raise _misfit(data, "an integer")
    return data


def _truth(data: Any) -> bool:
    if not isinstance(data, bool):
        raise _misfit(data, "true or false")
    return data


def _nothing(data: Any) -> None:
    if data is not None:
        raise _misfit(data, "null")


_SCALARS: dict[Any, _Take] = {float: _number, int: _integer, bool: _truth, type(None): _nothing}


def _of_text(keep: Keep) -> _Take:
    def text(data: Any) -> str:
        if not isinstance(data, str):
            raise _misfit(data, "a string")
        return keep(data, data)

    return text


def _of_literal(options: tuple[Any, ...]) -> _Take:
    wanted = f"one of {', '.join(map(repr, options))}"

    def literal(data: Any) -> Any:
        if data not in options:
            raise _misfit(data, wanted)
        return options[options.index(data)]

    return literal


def _of_union(hints: tuple[Any, ...], keep: Keep) -> _Take:
    options = [_taking(hint, keep) for hint in hints if hint is not type(None)]
    nullable = type(None) in hints

    def union(data: Any) -> Any:
        if data is None and nullable:
            return None
        first = None
        for option in options:
            try:
                return option(data)
            except _MisfitError as misfit:
                first = first or misfit
        assert first is not None
        raise first

    return union


def _of_array(kind: type[list[Any]] | type[tuple[Any, ...]], take: _Take) -> _Take:
    def array(data: Any) -> Any:
        if not isinstance(data, list):
            raise _misfit(data, "an array")
        items: list[Any] = []
        try:
            for item in data:
                items.append(take(item))  # its length says which item is wrong
        except _MisfitError as misfit:
            misfit.steps.append(f"[{len(items)}]")
            raise
        return kind(items)

    return array


def _of_mapping(take: _Take, keep: Keep) -> _Take:
    def mapping(data: Any) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise _misfit(data, "an object")
        found: dict[str, Any] = {}
        key = ""
        try:
            for key, item in data.items():
                found[keep(key, key)] = take(item)
        except _MisfitError as misfit:
            misfit.steps.append(f".{key}")
            raise
        return found

    return mapping


def _of_record(shape: Any, keep: Keep) -> _Take:
    layout = [
        (name, _taking(hint, keep), optional) for name, (hint, optional) in _layout(shape).items()
    ]
    build: Callable[..., Any] = shape

    def record(data: Any) -> Any:
        if not isinstance(data, dict):
            raise _misfit(data, "an object")
        values: dict[str, Any] = {}
        name = ""
        try:
            for name, take, optional in layout:
                if name in data:
                    values[name] = take(data[name])
                elif not optional:
                    raise _MisfitError("is missing")
        except _MisfitError as misfit:
            misfit.steps.append(f".{name}")
            raise
        return build(**values)

    return record


def _layout(shape: Any) -> dict[str, tuple[Any, bool]]:
    """Field name -> (type, whether it may be absent)."""
    hints = get_type_hints(shape)
    if is_typeddict(shape):
        return {name: (hint, name in shape.__optional_keys__) for name, hint in hints.items()}
    optional = {
        f.name
        for f in fields(shape)
        if f.default is not MISSING or f.default_factory is not MISSING
    }
    return {f.name: (hints[f.name], f.name in optional) for f in fields(shape) if f.init}


def _free(data: Any) -> Any:
    if isinstance(data, str):
        return _SPECIAL.get(data, data)
    if isinstance(data, list):
        return [_free(item) for item in data]
    return {key: _free(item) for key, item in data.items()} if isinstance(data, dict) else data
